// Messages between two processes: sends and receives that match by peer and tag, each of which
// moves on by itself. Small ones are copied into the peer's queue at once; for a large one the
// receiver lends a buffer when it has found the receive that it belongs to, so nothing that nobody
// waits for can be in the way of what somebody does. A rank may be its own peer.
//
// Of a parcel only a ticket is moved: its bytes lie in memory that the mailbox knows nothing of,
// and both ends are told when it is their turn to do something there.
#pragma once
#include <array>
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

using Ticket = std::array<uint64_t, 4>;  // what it says is between the two ends

class Mailbox {
 public:
  static std::size_t bytes(int world);  // of the group's memory

  explicit Mailbox(Group& group);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // What a transfer waits for this end to do.
  enum class Turn : uint8_t {
    none,
    fetch,  // a receive of a parcel: its message, or the next part, is there; `fetched` or `accept`
    supply,  // a parcel: the other end asks for the bytes; `supply`
    more,    // a parcel: a part has been fetched, and more are to come; `send_more`
  };

  class Transfer {  // a send or a receive that has been asked for
   public:
    virtual ~Transfer() = default;
    virtual bool done() const = 0;     // moved whole, or failed
    virtual void rethrow() const = 0;  // what it failed with, if it did
    virtual Rank peer() const = 0;     // of a receive from anybody: known when it is found
    virtual Turn turn() const = 0;
    // Of a parcel that was found; none: its bytes come as those of other messages do.
    virtual std::optional<Ticket> ticket() const = 0;
    virtual bool in_vain() const = 0;  // of a parcel: the other end can fetch none, now or later
  };

  // Neither waits for anybody. The memory must stay until the transfer is done. A receive of
  // another size or dtype than was sent fails with std::invalid_argument and leaves the memory as
  // it was; so does the send, unless the message was so small that it was done when it was sent.
  std::shared_ptr<Transfer> send(Rank to, const Envelope& envelope, const std::byte* data);
  std::shared_ptr<Transfer> receive(std::optional<Rank> from, const Envelope& envelope,
                                    std::byte* into);

  // The same of a parcel, larger than what is sent at once. Either end may be an ordinary one.
  std::shared_ptr<Transfer> send_parcel(Rank to, const Envelope& envelope, const Ticket& ticket);
  std::shared_ptr<Transfer> receive_parcel(std::optional<Rank> from, const Envelope& envelope);
  // What a turn is ended with; nothing happens when the transfer has failed since.
  void fetched(Transfer& receive, bool all = true);
  void send_more(Transfer& send);
  // Has the bytes sent there; not after a part was fetched. `never`: no parcel of the other end's
  // can be fetched here.
  void accept(Transfer& receive, std::byte* into, bool never);
  void supply(Transfer& send, const std::byte* data);
  // Moves on with every turn that comes; from any thread, costs one load.
  uint64_t turns() const;
  // Of a rank that cannot fetch any: who sends one to an ordinary receive is told.
  void take_no_parcels();

  // Moves whatever can be moved, unless another thread is at it. Returns whether anything was.
  bool progress();
  bool idle() const;  // is nothing of this rank's under way?
  // Moves things, and sleeps when there are none to move, until the transfer is done. Any number of
  // threads may wait at a time. Throws what it failed with; PeerLost and Timeout, and with those
  // everything that is under way fails.
  void wait(Transfer& transfer, const Occasion& occasion);
  // The same until `stop` says so, which is looked at whenever something moves or a turn comes; it
  // must hold when the transfer is done, and nothing is thrown that this has failed with.
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
