// Layout of a group's mailboxes in its shared memory: a header of a doorbell per rank and of the
// counters of all rings; then the data of three rings per ordered pair of ranks. A rank also has
// rings to itself. Ranks on other hosts, if there are any, are numbered after those of this host,
// and their rings lie in this rank's own memory.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <utility>

#include "../group/group.h"
#include "../group/segment.h"
#include "record_ring.h"

namespace pycollect::ipc {

class Mailbox;

// Ranks on other hosts, as the peers of a mailbox. A pair of ranks on different hosts has two
// copies of its rings, one at each rank. What a rank writes to its copy, and how far it has read,
// is sent to the other (csrc/torch/c10d/hosts/mirrored_rings.h). The data of a large message does
// not pass the rings if it can go from the memory of the one to that of the other. A peer's number
// is that in the mailbox: the ranks of this host come first. Thread-safe.
class RemotePeers {
 public:
  virtual ~RemotePeers() = default;
  // Call before the first `open`. `mailbox` must live until all threads have ended.
  virtual void attach(Mailbox& mailbox) = 0;
  // Makes this rank's copy of the rings, and begins to receive what the peer writes. Call before
  // the first message to or from it. May be called repeatedly.
  virtual void open(Rank peer) = 0;
  // Returns this rank's copy of the rings for messages to the peer, or from it:
  // MailArea::pair_bytes. The peer is open.
  virtual std::byte* rings(Rank peer, bool outgoing) = 0;
  // Sends the peer what this rank has written and read. Does not block.
  virtual void publish(Rank peer) = 0;
  // Begin to receive and to send the data of a message directly. The receiver begins first.
  virtual void receive_data(Rank peer, uint64_t number, std::byte* at, std::size_t bytes,
                            MemoryOwner owner) = 0;
  virtual void send_data(Rank peer, uint64_t number, const std::byte* at, std::size_t bytes,
                         MemoryOwner owner) = 0;
  // Returns whether all that was written has arrived, or its peer is gone. Requests the missing
  // acknowledgments.
  virtual bool has_delivered() = 0;

  // Whether the connection to a peer, or to any, is closed. All that arrived has been taken then.
  virtual bool is_gone(Rank peer) const = 0;
  virtual bool any_gone() const = 0;
  // Aborts the group because of a peer that is gone or, if `is_late`, has not arrived in time.
  [[noreturn]] virtual void fail(Rank peer, bool is_late, const OpContext& context) = 0;
};

class MailArea {
 public:
  // In place of a number of ranks: rings between hosts, whose memory is used by few pairs. As the
  // handshake between hosts takes longer than copies of 500 KiB, larger messages are eager, too.
  static constexpr int kRemoteSharers = 1 << 10;
  static constexpr std::size_t kRemoteEager = 512 << 10;

  // Bytes of one message ring. A rank's message rings take 1 MiB together, and each at most
  // 128 KiB: two thousand of the smallest messages.
  static constexpr std::size_t message_bytes(int world) {
    return world == kRemoteSharers ? 4 << 20 : share(1 << 20, 128 << 10, world);
  }
  // Largest eager message: it is copied into the ring, and its send completes at once. For larger
  // ones both ends copy at the same time, which outweighs the RTS/CTS handshake (16 KiB took
  // 0.86 us with the handshake and takes 0.59 us eagerly).
  static constexpr std::size_t max_eager_bytes(int world) {
    return std::min<std::size_t>(world == kRemoteSharers ? kRemoteEager : 16 << 10,
                                 most_payload(message_bytes(world)));
  }
  // Bytes of one fragment ring. Fragments of large messages have a ring of their own, so that no
  // unexpected message blocks them. A rank's incoming fragment rings take 2 MiB together, and each
  // at most 1 MiB. On crowded cores each progress call moves that much (with 256 KiB between two
  // ranks, messages of 64 KiB to 4 MiB took up to twice as long).
  static constexpr std::size_t fragment_ring_bytes(int world) {
    return share(2 << 20, 1 << 20, world == kRemoteSharers ? 1 : world);
  }
  // Payload bytes of one fragment. Small enough that both ends copy in parallel from early on, and
  // large enough that passing the ring counters between cores (0.15 us) is cheap beside the copy.
  // A fragment ring holds a whole number of such records.
  static constexpr std::size_t fragment_bytes(int world, uint64_t bytes) {
    const std::size_t most =
        std::min<std::size_t>(64 << 10, fragment_ring_bytes(world) / RingMemory::kFewest);
    return std::clamp<std::size_t>(std::bit_ceil(bytes / 8), 4 << 10, most) - sizeof(Record);
  }
  // Bytes of one reply ring: 16 replies. Replies that do not fit are queued by the receiver.
  static constexpr std::size_t kReplyBytes = 1 << 10;

  static constexpr std::size_t header_bytes(int world) {
    return SegmentLayout::up(world * sizeof(Doorbell) + world * world * kCountersBytes);
  }
  static constexpr std::size_t bytes(int world) {
    return header_bytes(world) + world * world * data_bytes(world);
  }
  // Bytes of a pair of ranks on different hosts in memory of its own.
  static constexpr std::size_t pair_bytes() { return kCountersBytes + data_bytes(kRemoteSharers); }
  // The three rings of a pair of ranks. The receiver writes the replies, the sender the others.
  struct PairRings {
    RingMemory messages, fragments, replies;
  };
  // The rings between hosts in the memory of a pair, which has pair_bytes().
  static PairRings remote_rings(std::byte* pair) {
    return rings_at(pair, pair + kCountersBytes, kRemoteSharers, nullptr);
  }

  explicit MailArea(const Group& group)
      : base_(group.mailboxes()), world_(group.world()), segment_(group.segment().get()) {}

  Doorbell& doorbell(Rank r) const {
    return *reinterpret_cast<Doorbell*>(base_ + r * sizeof(Doorbell));
  }
  // The rings of the messages that `from` sends to `to`, with the replies (CTS, NACK) to them.
  PairRings rings(Rank from, Rank to) const {
    const std::size_t pair = from * world_ + to;
    return rings_at(base_ + world_ * sizeof(Doorbell) + pair * kCountersBytes,
                    base_ + header_bytes(world_) + pair * data_bytes(world_), world_, segment_);
  }

 private:
  static constexpr std::size_t share(std::size_t all, std::size_t most, int world) {
    return std::min(most, std::bit_floor(all / world));
  }
  static constexpr std::size_t most_payload(std::size_t ring) {
    return ring / RingMemory::kFewest - sizeof(Record);
  }
  static constexpr std::size_t kCountersBytes = 3 * sizeof(RingCounters);  // of a pair
  static constexpr std::size_t data_bytes(int world) {
    return message_bytes(world) + fragment_ring_bytes(world) + kReplyBytes;
  }
  static PairRings rings_at(std::byte* counters, std::byte* data, int world, Segment* segment) {
    const auto ring = [&](std::size_t bytes) {
      std::byte* const own = std::exchange(counters, counters + sizeof(RingCounters));
      return RingMemory{reinterpret_cast<RingCounters*>(own), std::exchange(data, data + bytes),
                        bytes, segment};
    };
    return {ring(message_bytes(world)), ring(fragment_ring_bytes(world)), ring(kReplyBytes)};
  }

  std::byte* const base_;
  const int world_;
  Segment* const segment_;
};

}  // namespace pycollect::ipc
