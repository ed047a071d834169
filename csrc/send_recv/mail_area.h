// Layout of a group's mailboxes in its shared memory: a doorbell per rank, then three rings per
// ordered pair of ranks. A rank also has rings to itself.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>

#include "../group/doorbell.h"
#include "../group/group.h"
#include "record_ring.h"

namespace pycollect::ipc {

class MailArea {
 public:
  // Bytes of one message ring. A rank's message rings take 1 MiB together, and each at most
  // 128 KiB: two thousand of the smallest messages.
  static constexpr std::size_t message_bytes(int world) { return share(1 << 20, 128 << 10, world); }
  // Largest eager message: it is copied into the ring, and its send completes at once. For larger
  // ones both ends copy at the same time, which outweighs the RTS/CTS handshake (16 KiB took
  // 0.86 us with the handshake and takes 0.59 us eagerly).
  static constexpr std::size_t max_eager_bytes(int world) {
    return std::min<std::size_t>(16 << 10, most_payload(message_bytes(world)));
  }
  // Bytes of one fragment ring. Fragments of large messages have a ring of their own, so that no
  // unexpected message blocks them. A rank's incoming fragment rings take 2 MiB together, and each
  // at most 1 MiB. On crowded cores each progress call moves that much (with 256 KiB between two
  // ranks, messages of 64 KiB to 4 MiB took up to twice as long).
  static constexpr std::size_t fragment_ring_bytes(int world) {
    return share(2 << 20, 1 << 20, world);
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

  static constexpr std::size_t bytes(int world) {
    return world * sizeof(Doorbell) + world * world * pair_bytes(world);
  }
  // Maximum number of messages in one message ring.
  static constexpr int most_unread(int world) {
    return static_cast<int>(message_bytes(world) / detail::kRecordUnit);
  }

  explicit MailArea(const Group& group)
      : base_(group.mailboxes()), world_(group.world()), group_(&group) {}

  int world() const { return world_; }
  Rank world_rank(Rank r) const { return group_->world_rank(r); }
  Doorbell& doorbell(Rank r) const {
    return *reinterpret_cast<Doorbell*>(base_ + r * sizeof(Doorbell));
  }
  RingMemory messages(Rank from, Rank to) const { return ring(from, to, 0, message_bytes(world_)); }
  RingMemory fragments(Rank from, Rank to) const {
    return ring(from, to, ring_bytes(message_bytes(world_)), fragment_ring_bytes(world_));
  }
  // Replies (CTS, NACK) that `to` writes for `from` about the messages of `from`.
  RingMemory replies(Rank from, Rank to) const {
    return ring(from, to, pair_bytes(world_) - ring_bytes(kReplyBytes), kReplyBytes);
  }

 private:
  static constexpr std::size_t share(std::size_t all, std::size_t most, int world) {
    return std::min(most, std::bit_floor(all / world));
  }
  static constexpr std::size_t most_payload(std::size_t ring) {
    return ring / RingMemory::kFewest - sizeof(Record);
  }
  static constexpr std::size_t ring_bytes(std::size_t data) { return sizeof(RingCounters) + data; }
  static constexpr std::size_t pair_bytes(int world) {
    return ring_bytes(message_bytes(world)) + ring_bytes(fragment_ring_bytes(world)) +
           ring_bytes(kReplyBytes);
  }
  RingMemory ring(Rank from, Rank to, std::size_t at, std::size_t bytes) const {
    std::byte* const ring =
        base_ + world_ * sizeof(Doorbell) + (from * world_ + to) * pair_bytes(world_) + at;
    return {reinterpret_cast<RingCounters*>(ring), ring + sizeof(RingCounters), bytes};
  }

  std::byte* base_;
  int world_;
  const Group* group_;
};

}  // namespace pycollect::ipc
