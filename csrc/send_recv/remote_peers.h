// Ranks on other hosts, as the peers of a mailbox. A pair of ranks on different hosts has two
// copies of its rings, one at each rank. What a rank writes to its copy, and how far it has read,
// is sent to the other (csrc/torch/c10d/hosts/mirrored_rings.h). The data of a large message does
// not pass the rings if it can go from the memory of the one to that of the other.
#pragma once
#include <cstddef>

#include "../group/memory_owner.h"
#include "../group/wait.h"
#include "../plan/plan.h"

namespace pycollect::ipc {

// What threads tell the mailbox: that a peer has called, and that the data of a message has been
// moved directly. `number`: of the message among those of its sender to its receiver.
class RemoteEvents {
 public:
  virtual ~RemoteEvents() = default;
  virtual void called(Rank by) = 0;
  virtual void received(Rank from, uint64_t number) = 0;
  virtual void sent(Rank to, uint64_t number) = 0;
};

// A peer's number is that in the mailbox: the ranks of this host come first. Thread-safe.
class RemotePeers {
 public:
  virtual ~RemotePeers() = default;
  // Call before the first `open`. `mailbox` must live until all threads have ended.
  virtual void attach(RemoteEvents& mailbox) = 0;
  virtual int count() const = 0;
  // Makes this rank's copy of the rings, and begins to receive what the peer writes. Call before
  // the first message to or from it. May be called repeatedly.
  virtual void open(Rank peer) = 0;
  // Returns this rank's copy of the rings for messages to the peer, or from it:
  // MailArea::pair_bytes of kRemoteSharers. The peer is open.
  virtual std::byte* rings(Rank peer, bool outgoing) = 0;
  // Sends the peer what this rank has written and read. Does not block.
  virtual void publish(Rank peer) = 0;
  // Begin to receive and to send the data of a message directly. The receiver begins first.
  virtual void receive_data(Rank peer, uint64_t number, std::byte* at, std::size_t bytes,
                            MemoryOwner owner) = 0;
  virtual void send_data(Rank peer, uint64_t number, const std::byte* at, std::size_t bytes,
                         MemoryOwner owner) = 0;
  // Returns whether all that was written has arrived, or its peer is gone, and asks peers that have
  // not confirmed it.
  virtual bool has_delivered() = 0;

  // Whether the connection to a peer, or to any, is closed. All that arrived has been taken then.
  virtual bool is_gone(Rank peer) const = 0;
  virtual bool any_gone() const = 0;
  // Aborts the group because of a peer that is gone or, if `is_late`, has not arrived in time.
  [[noreturn]] virtual void fail(Rank peer, bool is_late, const OpContext& context) = 0;
};

}  // namespace pycollect::ipc
