// See remote_message.h.
#include "remote_message.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstring>

#include "../../../plan/error.h"
#include "../../threads.h"
#include "../in_flight_guard.h"

namespace pycollect::dist {
namespace {

// Numbers of messages on the wire. Those below belong to collectives. The second message and the
// answer have a number of their own for each send, as far as it matters.
constexpr int kSends = (1 << 28) - 2;
constexpr int kFirstMessages = 1 << 30, kSecondMessages = kFirstMessages + kRemoteTags,
              kAnswers = kSecondMessages + kSends;
static_assert(kAnswers + (kSends - 1) < ProcessGroupWire::kFarewell);

}  // namespace

void RemoteMessage::post() {
  dense_ = op_.tensor;
  if (!dense_.is_contiguous()) {
    dense_ = at::Tensor(at::detail::empty_cpu(dense_.sizes(), dense_.scalar_type()));
    if (!receives_) copy_strided(dense_, op_.tensor);
  }
  memory_ = static_cast<std::byte*>(receives_ ? dense_.mutable_data_ptr()
                                              : const_cast<void*>(dense_.const_data_ptr()));
  all_->link_.run(*all_->group_, context(), *op_.peer, [&] {
    if (!receives_) return post_send();
    posted_.push_back(all_->wire_->post_receive(*op_.peer, kFirstMessages + op_.tag, first_.data(),
                                                first_.size(), deadline_, self()));
  });
}

void RemoteMessage::post_send() {
  ProcessGroupWire& wire = *all_->wire_;
  const FirstMessage header{envelope_, static_cast<int>(number_ % kSends)};
  std::memcpy(first_.data(), &header, sizeof header);
  if (is_eager() && envelope_.bytes > 0)
    std::memcpy(first_.data() + sizeof header, memory_, envelope_.bytes);
  first_.resize(sizeof header + (is_eager() ? envelope_.bytes : 0));
  const Rank to = *op_.peer;
  posted_.push_back(wire.post_send(to, kFirstMessages + op_.tag, first_.data(), first_.size(),
                                   deadline_, self()));
  if (is_eager()) return;
  posted_.push_back(wire.post_send(to, kSecondMessages + header.send, memory_, envelope_.bytes,
                                   deadline_, self()));
  posted_.push_back(wire.post_receive(to, kAnswers + header.send,
                                      reinterpret_cast<std::byte*>(&answer_), sizeof answer_,
                                      deadline_, self()));
}

void RemoteMessage::await(const ProcessGroupWire::PendingPtr& pending) {
  all_->link_.run(*all_->group_, context(), *op_.peer,
                  [&] { all_->wire_->await(pending, deadline_); });
}

void RemoteMessage::finish_send() {
  for (const auto& pending : posted_) await(pending);
  if (!is_eager() && !matches(answer_))
    std::rethrow_exception(ipc::mismatch(all_->me(), envelope_, *op_.peer, answer_));
}

// A receiver takes a second message that it cannot use, too: the sender waits for it.
void RemoteMessage::finish_receive() {
  await(posted_.front());
  FirstMessage header;
  std::memcpy(&header, first_.data(), sizeof header);
  const ipc::Envelope& sent = header.envelope;
  const bool accepted = matches(sent);
  if (sent.bytes > kEagerBytes) {
    ProcessGroupWire& wire = *all_->wire_;
    const Rank from = *op_.peer;
    unused_.resize(accepted ? 0 : sent.bytes);
    answer_ = envelope_;
    all_->link_.run(*all_->group_, context(), from, [&] {
      posted_.push_back(wire.post_receive(from, kSecondMessages + header.send,
                                          accepted ? memory_ : unused_.data(), sent.bytes,
                                          deadline_, self()));
      wire.await(posted_.back(), deadline_);
      posted_.push_back(wire.post_send(from, kAnswers + header.send,
                                       reinterpret_cast<const std::byte*>(&answer_), sizeof answer_,
                                       deadline_, self()));
      wire.await(posted_.back(), deadline_);
    });
  } else if (accepted && sent.bytes > 0) {
    std::memcpy(memory_, first_.data() + sizeof header, sent.bytes);
  }
  if (!accepted) std::rethrow_exception(ipc::mismatch(*op_.peer, sent, all_->me(), envelope_));
  if (!dense_.is_same(op_.tensor)) copy_strided(op_.tensor, dense_);
}

void RemoteMessage::run(ipc::Deadline at_most) {
  {
    std::unique_lock lock(mutex_);
    if (state_ != State::posted) {
      changed_.wait_until(lock, at_most, [&] { return state_ == State::done; });
      return;
    }
    state_ = State::running;
  }
  deadline_ = std::min(deadline_, at_most);
  std::exception_ptr error;
  try {
    if (receives_)
      finish_receive();
    else
      finish_send();
  } catch (...) {
    error = std::current_exception();
  }
  posted_.clear();  // after a failure, the wire keeps the transfers, and they this message
  c10::intrusive_ptr<Future> future;
  {
    const std::lock_guard lock(mutex_);
    error_ = error;
    state_ = State::done;
    future = future_;
    changed_.notify_all();
  }
  all_->forget(this);
  if (future) complete(*future, {op_.tensor}, error, staging());
}

void RemoteMessage::start() {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::posted || std::exchange(threaded_, true)) return;
  }
  all_->run_in_thread(
      [me = c10::intrusive_ptr<RemoteMessage>::unsafe_reclaim_from_nonowning(this)]() mutable {
        me->run();
        me.reset();  // may release a tensor, which may take the GIL
      });
}

bool RemoteMessage::wait(std::chrono::milliseconds timeout) {
  const InFlightGuard in_flight;
  all_->fork_guard_.require_not_forked(name_);
  if (is_limit(timeout)) {
    start();
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return state_ == State::done; }))
      throw_unfinished(text(name_, receives_ ? " from rank " : " to rank ", *op_.peer), timeout);
  } else {
    run();
  }
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

c10::intrusive_ptr<Future> RemoteMessage::getFuture() {
  all_->fork_guard_.require_not_forked(name_);
  bool done;
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = new_future(staging());
    done = state_ == State::done;
  }
  if (done)
    complete(*future_, {op_.tensor}, error_, staging());
  else
    start();
  return future_;
}

}  // namespace pycollect::dist
