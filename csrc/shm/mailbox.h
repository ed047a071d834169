// Messages between two processes: sends and receives that match by peer and tag, each of which
// moves on by itself. Small ones are copied into the peer's queue at once; for a large one the
// receiver lends a pair of buffers when it has found the receive that it belongs to, so nothing
// that nobody waits for can be in the way of what somebody does.
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "group.h"

namespace pycollect::shm {

struct Envelope {  // what both ends must agree on
  uint64_t bytes;
  uint8_t dtype;
  uint32_t tag;
};

class Mailbox {
 public:
  static std::size_t bytes(int world);  // of the group's memory

  explicit Mailbox(Group& group);
  ~Mailbox();

  class Transfer {  // a send or a receive that has been asked for
   public:
    virtual ~Transfer() = default;
    virtual bool done() const = 0;     // moved whole, or failed
    virtual void rethrow() const = 0;  // what it failed with, if it did
    virtual Rank peer() const = 0;     // of a receive from anybody: known when it is done
  };

  // The memory must stay until the transfer is done. A receive of fewer bytes than were sent, or of
  // another dtype, fails on both sides and leaves the memory as it was.
  std::shared_ptr<Transfer> send(Rank to, const Envelope& envelope, const std::byte* data);
  std::shared_ptr<Transfer> receive(std::optional<Rank> from, const Envelope& envelope,
                                    std::byte* into);

  // Moves whatever can be moved, from any thread. Returns whether anything was.
  bool progress();
  bool idle();  // is nothing of this rank's under way?
  // Moves things until the transfer is done. Throws what it failed with; PeerLost, Timeout.
  void wait(Transfer& transfer, const Occasion& occasion);

 private:
  class Post;
  std::unique_ptr<Post> post_;
};

}  // namespace pycollect::shm
