// Messages between two processes: sends and receives that match by peer and tag, each of which
// moves on by itself. Small ones are copied into the peer's queue at once; for a large one the
// receiver lends a buffer when it has found the receive that it belongs to, so nothing that nobody
// waits for can be in the way of what somebody does. A rank may be its own peer.
#pragma once
#include <functional>
#include <memory>
#include <optional>

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
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  class Transfer {  // a send or a receive that has been asked for
   public:
    virtual ~Transfer() = default;
    virtual bool done() const = 0;     // moved whole, or failed
    virtual void rethrow() const = 0;  // what it failed with, if it did
    virtual Rank peer() const = 0;     // of a receive from anybody: known when it is done
  };

  // Neither waits for anybody. The memory must stay until the transfer is done. A receive of
  // another size or dtype than was sent fails with std::invalid_argument and leaves the memory as
  // it was; so does the send, unless the message was so small that it was done when it was sent.
  std::shared_ptr<Transfer> send(Rank to, const Envelope& envelope, const std::byte* data);
  std::shared_ptr<Transfer> receive(std::optional<Rank> from, const Envelope& envelope,
                                    std::byte* into);

  // Moves whatever can be moved, unless another thread is at it. Returns whether anything was.
  bool progress();
  bool idle() const;  // is nothing of this rank's under way?
  // Moves things, and sleeps when there are none to move, until the transfer is done. Any number of
  // threads may wait at a time. Throws what it failed with; PeerLost and Timeout, and with those
  // everything that is under way fails.
  void wait(Transfer& transfer, const Occasion& occasion);
  // The same for everything that is under way, until all is done or `stop` says so; for a thread
  // that keeps things moving while nobody waits. Returns idle(). `stop` is looked at about every
  // 10 ms when nothing moves, and after `wake`.
  bool work(const std::function<bool()>& stop, const Occasion& occasion);
  void wake();

 private:
  class Post;
  std::unique_ptr<Post> post_;
};

}  // namespace pycollect::shm
