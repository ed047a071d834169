// See mailbox.h: requests, and how a thread waits for them.
#include "mailbox.h"

#include "../plan/dtype.h"
#include "../plan/error.h"
#include "mail_post.h"

namespace pycollect::shm {
namespace {

std::string name(const Envelope& envelope) {
  const bool known = envelope.dtype < DTypes::size;
  const std::string dtype =
      known ? pycollect::name(DType{envelope.dtype}) : text("dtype ", int{envelope.dtype});
  return text(envelope.bytes, " bytes of ", dtype);
}

}  // namespace

std::exception_ptr mismatch(Rank from, const Envelope& sent, Rank to, const Envelope& wanted) {
  return std::make_exception_ptr(std::invalid_argument(
      text("rank ", from, " sent ", name(sent), " with tag ", sent.tag, " to rank ", to,
           ", which received ", name(wanted), " there: both must be the same")));
}

std::size_t Mailbox::bytes(int world) { return MailArea::bytes(world); }

Mailbox::Mailbox(Group& group) : post_(std::make_unique<Post>(group)) {}
Mailbox::~Mailbox() = default;

std::shared_ptr<Mailbox::Transfer> Mailbox::send(Rank to, const Envelope& envelope,
                                                 const std::byte* data) {
  const int world = post_->group().world();
  require(to >= 0 && to < world, "send to rank ", to, " of a group of ", world);
  const auto mail = std::make_shared<Mail>(to, envelope, data);
  post_->send(mail);
  return mail;
}

std::shared_ptr<Mailbox::Transfer> Mailbox::receive(std::optional<Rank> from,
                                                    const Envelope& envelope, std::byte* into) {
  const int world = post_->group().world();
  const Rank peer = from.value_or(Mail::kAnybody);
  require(!from || (peer >= 0 && peer < world), "receive from rank ", peer, " of a group of ",
          world);
  const auto mail = std::make_shared<Mail>(peer, envelope, into);
  post_->receive(mail);
  return mail;
}

bool Mailbox::progress() { return post_->try_move(); }
bool Mailbox::idle() const { return post_->idle(); }
void Mailbox::wake() { post_->ring_own(); }

void Mailbox::wait(Transfer& transfer, const Occasion& occasion) {
  const auto missing = [&] {
    const Rank peer = transfer.peer();
    return peer == Mail::kAnybody ? post_->anybody() : std::vector<Rank>{peer};
  };
  if (!transfer.done())
    post_->wait({[&] { return transfer.done(); }, missing, &static_cast<Mail&>(transfer)},
                occasion);
  transfer.rethrow();
}

bool Mailbox::work(const std::function<bool()>& stop, const Occasion& occasion) {
  post_->wait({[&] { return idle() || stop(); }, [&] { return post_->missing(); }}, occasion);
  return idle();
}

}  // namespace pycollect::shm
