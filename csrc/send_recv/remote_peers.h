// Ranks on other hosts, as the peers of a mailbox. A pair of ranks on different hosts has two
// copies of its rings, one at each rank. What a rank writes to its copy, and how far it has read,
// is sent to the other (csrc/torch/c10d/hosts/mirrored_rings.h).
#pragma once
#include "../group/wait.h"
#include "../plan/plan.h"

namespace pycollect::ipc {

// A peer's number is that in the mailbox: the ranks of this host come first. Thread-safe.
class RemotePeers {
 public:
  virtual ~RemotePeers() = default;
  virtual int count() const = 0;
  // Returns this rank's copy of the rings for messages to the peer, or from it:
  // MailArea::pair_bytes of kRemoteSharers.
  virtual std::byte* rings(Rank peer, bool outgoing) = 0;
  // Begins to receive what the peer writes. Call before the first message to or from it.
  virtual void open(Rank peer) = 0;
  // Sends the peer what this rank has written and read. Does not block.
  virtual void publish(Rank peer) = 0;
  // Returns whether all that was written has arrived, or its peer is gone, and asks peers that have
  // not confirmed it.
  virtual bool has_delivered() = 0;

  // Whether the connection to a peer, or to any, is closed. All that it has sent has arrived then.
  virtual bool is_gone(Rank peer) const = 0;
  virtual bool any_gone() const = 0;
  // Aborts the group because of a peer that is gone or, if `is_late`, has not arrived in time.
  [[noreturn]] virtual void fail(Rank peer, bool is_late, const OpContext& context) = 0;
};

}  // namespace pycollect::ipc
