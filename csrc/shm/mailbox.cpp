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

uint64_t checked_there(const Mail& mail, uint64_t there) {
  require(there <= mail.envelope.bytes, "a message of ", mail.envelope.bytes, " bytes has ", there,
          " there");
  return there;
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

Rank Mailbox::check_to(Rank to) const {
  const int world = post_->group().world();
  require(to >= 0 && to < world, "send to rank ", to, " of a group of ", world);
  return to;
}

Rank Mailbox::check_from(std::optional<Rank> from) const {
  const int world = post_->group().world();
  const Rank peer = from.value_or(Mail::kAnybody);
  require(!from || (peer >= 0 && peer < world), "receive from rank ", peer, " of a group of ",
          world);
  return peer;
}

std::shared_ptr<Mailbox::Transfer> Mailbox::send(Rank to, const Envelope& envelope,
                                                 const std::byte* data) {
  const auto mail = std::make_shared<Mail>(check_to(to), envelope, data);
  post_->send(mail);
  return mail;
}

std::shared_ptr<Mailbox::Transfer> Mailbox::send_partly(Rank to, const Envelope& envelope,
                                                        const std::byte* data, uint64_t there) {
  const std::size_t most_whole = MailArea::most_whole(post_->group().world());
  require(envelope.bytes > most_whole, "a message of ", envelope.bytes,
          " bytes cannot be sent partly: up to ", most_whole, " are copied at once");
  const auto mail = std::make_shared<Mail>(check_to(to), envelope, data);
  mail->there = checked_there(*mail, there);
  post_->send(mail);
  return mail;
}

void Mailbox::supply(Transfer& send, uint64_t there) {
  Mail& mail = static_cast<Mail&>(send);
  post_->supply(mail, checked_there(mail, there));
}

std::shared_ptr<Mailbox::Transfer> Mailbox::receive(std::optional<Rank> from,
                                                    const Envelope& envelope, std::byte* into) {
  const auto mail = std::make_shared<Mail>(check_from(from), envelope, into);
  post_->receive(mail);
  return mail;
}

bool Mailbox::progress() { return post_->try_move(); }
bool Mailbox::idle() const { return post_->idle(); }
void Mailbox::wake() { post_->ring_own(); }
void Mailbox::fail(const std::exception_ptr& error) { post_->fail(error); }

void Mailbox::wait(Transfer& transfer, const Occasion& occasion) {
  if (!transfer.done()) wait(transfer, [&] { return transfer.done(); }, occasion);
  transfer.rethrow();
}

void Mailbox::wait(Transfer& transfer, const std::function<bool()>& stop,
                   const Occasion& occasion) {
  if (!stop())
    post_->wait({stop, [&] { return missing(transfer); }, &static_cast<Mail&>(transfer)}, occasion);
}

std::vector<Rank> Mailbox::missing(const Transfer& transfer) const {
  const Rank peer = transfer.peer();
  return peer == Mail::kAnybody ? post_->anybody() : std::vector<Rank>{peer};
}

Rank Mailbox::rank() const { return post_->group().rank(); }

bool Mailbox::work(const std::function<bool()>& stop, const Occasion& occasion) {
  post_->wait({[&] { return idle() || stop(); }, [&] { return post_->missing(); }}, occasion);
  return idle();
}

}  // namespace pycollect::shm
