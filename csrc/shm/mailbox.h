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
    virtual bool done() const = 0;       // moved whole, or failed
    virtual void rethrow() const = 0;    // what it failed with, if it did
    virtual Rank peer() const = 0;       // of a receive from anybody: known when it is found
    virtual uint64_t moved() const = 0;  // bytes, from the first on: from here, or to here
  };

  // Neither waits for anybody. The memory must stay until the transfer is done. A receive of
  // another size or dtype than was sent fails with std::invalid_argument and leaves the memory as
  // it was; so does the send, unless the message was so small that it was done when it was sent.
  std::shared_ptr<Transfer> send(Rank to, const Envelope& envelope, const std::byte* data);
  std::shared_ptr<Transfer> receive(std::optional<Rank> from, const Envelope& envelope,
                                    std::byte* into);

  // A send of which only the first bytes are `there` yet. It goes as far as they do, and takes one
  // of the receiver's buffers from when it has been asked for until its end.
  std::shared_ptr<Transfer> send_partly(Rank to, const Envelope& envelope, const std::byte* data,
                                        uint64_t there);
  // So many of its bytes are there now. Moves none of them: `progress` does, and whoever waits.
  void supply(Transfer& send, uint64_t there);

  // Moves whatever can be moved, unless another thread is at it. Returns whether anything was.
  bool progress();
  bool idle() const;  // is nothing of this rank's under way?
  // Moves things, and sleeps when there are none to move, until the transfer is done. Any number of
  // threads may wait at a time. Throws what it failed with; PeerLost and Timeout, and with those
  // everything that is under way fails.
  void wait(Transfer& transfer, const Occasion& occasion);
  // The same until `stop` says so, which is looked at whenever something moves; it must hold when
  // the transfer is done, and nothing is thrown that this has failed with.
  void wait(Transfer& transfer, const std::function<bool()>& stop, const Occasion& occasion);
  // The same for everything that is under way, until all is done or `stop` says so; for a thread
  // that keeps things moving while nobody waits. Returns idle(). `stop` is looked at about every
  // 10 ms when nothing moves, and after `wake`.
  bool work(const std::function<bool()>& stop, const Occasion& occasion);
  void wake();
  void fail(const std::exception_ptr& error);  // everything that is under way, with this
  std::vector<Rank> missing(const Transfer& transfer) const;  // whom it depends on
  Rank rank() const;

 private:
  class Post;
  Rank check_to(Rank to) const;
  Rank check_from(std::optional<Rank> from) const;
  std::unique_ptr<Post> post_;
};

}  // namespace pycollect::shm
