// See mailbox.h: requests, and the lock under which things are moved.
#include "mailbox.h"

#include <bit>

#include "../plan/dtype.h"
#include "../plan/error.h"

namespace pycollect::shm {
namespace {

std::string name(const Envelope& envelope) {
  const bool known = envelope.dtype < DTypes::size;
  const std::string dtype =
      known ? pycollect::name(DType{envelope.dtype}) : text("dtype ", int{envelope.dtype});
  return text(envelope.bytes, " bytes of ", dtype);
}

void check_there(uint64_t there, uint64_t bytes) {
  require(there <= bytes, "a message of ", bytes, " bytes has ", there, " there");
}

}  // namespace

std::exception_ptr mismatch(Rank from, const Envelope& sent, Rank to, const Envelope& wanted) {
  return std::make_exception_ptr(std::invalid_argument(
      text("rank ", from, " sent ", name(sent), " with tag ", sent.tag, " to rank ", to,
           ", which received ", name(wanted), " there: both must be the same")));
}

Mailbox::Mailbox(Group& group)
    : group_(group),
      area_(group.mailboxes(), group.world()),
      me_(group.rank()),
      outgoing_(area_, me_, effects_),
      incoming_(area_, me_, effects_) {}

Rank Mailbox::check_to(Rank to) const {
  const int world = group_.world();
  require(to >= 0 && to < world, "send to rank ", to, " of a group of ", world);
  return to;
}

Rank Mailbox::check_from(std::optional<Rank> from) const {
  const int world = group_.world();
  const Rank peer = from.value_or(kAnybody);
  require(!from || (peer >= 0 && peer < world), "receive from rank ", peer, " of a group of ",
          world);
  return peer;
}

TransferPtr Mailbox::send(Rank to, const Envelope& envelope, const std::byte* data) {
  const auto made = std::make_shared<Transfer>(check_to(to), envelope, data, envelope.bytes);
  return ask("send", made, [&] { outgoing_.send(made); });
}

TransferPtr Mailbox::send_partly(Rank to, const Envelope& envelope, const std::byte* data,
                                 uint64_t there) {
  const std::size_t most_whole = MailArea::most_whole(group_.world());
  require(envelope.bytes > most_whole, "a message of ", envelope.bytes,
          " bytes cannot be sent partly: up to ", most_whole, " are copied at once");
  check_there(there, envelope.bytes);
  const auto made = std::make_shared<Transfer>(check_to(to), envelope, data, there);
  return ask("send", made, [&] { outgoing_.send(made); });
}

void Mailbox::supply(Transfer& send, uint64_t there) {
  check_there(there, send.envelope.bytes);
  if (!origin_.is_here()) return;
  const Locked locked(mutex_);
  send.there_ = there;
}

TransferPtr Mailbox::receive(std::optional<Rank> from, const Envelope& envelope, std::byte* into) {
  const auto made = std::make_shared<Transfer>(check_from(from), envelope, into);
  return ask("recv", made, [&] { incoming_.receive(made); });
}

TransferPtr Mailbox::ask(const char* operation, TransferPtr transfer,
                         const std::function<void()>& act) {
  group_.require_whole({operation, ++requests_, Deadline::max()});
  Locked locked(mutex_);
  ++open_;
  guard(act);
  unlock(std::move(locked));
  return transfer;
}

// Rings outside the lock: the kernel takes its time to wake somebody, who then wants the lock.
bool Mailbox::unlock(Locked locked) {
  const Effects effects = std::exchange(effects_, {});
  open_.fetch_sub(effects.finished, std::memory_order_acq_rel);
  locked.unlock();
  for (uint64_t left = effects.touched; left != 0; left &= left - 1)
    area_.bell(std::countr_zero(left)).ring();
  if (effects.awaited) wake();
  return effects.touched != 0 || effects.finished != 0;
}

// Under the lock. What a peer has written that makes no sense ends the group, and so does a want of
// memory: nothing stays listed whose caller has been told that it failed.
template <class Act>
void Mailbox::guard(const Act& act) {
  try {
    act();
  } catch (const std::exception& error) {
    group_.abort(error.what());
    outgoing_.fail(std::current_exception());
    incoming_.fail(std::current_exception());
  }
}

bool Mailbox::move(Locked locked) {
  guard([this] {
    outgoing_.move();
    incoming_.move();
  });
  return unlock(std::move(locked));
}

bool Mailbox::progress() {
  if (!origin_.is_here()) return false;
  Locked locked(mutex_, std::try_to_lock);
  return locked && move(std::move(locked));
}

void Mailbox::fail(const std::exception_ptr& error) {
  if (!origin_.is_here()) return;
  Locked locked(mutex_);
  outgoing_.fail(error);
  incoming_.fail(error);
  unlock(std::move(locked));
}

void Mailbox::wake() {
  area_.bell(me_).ring();
  beside_.ring();
}

}  // namespace pycollect::shm
