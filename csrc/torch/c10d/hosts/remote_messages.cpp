// See remote_messages.h.
#include "remote_messages.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstring>

#include "../../../group/new_thread.h"
#include "../../../plan/error.h"
#include "../../../send_recv/mailbox.h"
#include "../../threads.h"
#include "../binder.h"
#include "../in_flight_guard.h"
#include "../work.h"

namespace pycollect::dist {
namespace {

// Numbers of messages on the wire. Those below belong to collectives. The second message and the
// answer have a number of their own for each send, as far as it matters.
constexpr int kTags = 1 << 29, kSends = (1 << 28) - 2;
constexpr int kFirstMessages = 1 << 30, kSecondMessages = kFirstMessages + kTags,
              kAnswers = kSecondMessages + kSends;

struct FirstMessage {
  ipc::Envelope envelope;
  int send;  // number of the send among those of its rank, modulo kSends
};

}  // namespace

// A send posts its messages when it is constructed, a receive the first one.
class RemoteMessage final : public GroupWork {
 public:
  RemoteMessage(std::shared_ptr<RemoteMessages> all, const P2POp& op, uint64_t number,
                const char* name, bool receives)
      : all_(std::move(all)),
        op_(op),
        number_(number),
        name_(name),
        receives_(receives),
        envelope_{static_cast<uint64_t>(op.tensor.nbytes()),
                  static_cast<uint8_t>(dtype_of(op.tensor, {name, "tensor"})),
                  static_cast<uint32_t>(op.tag)},
        first_(sizeof(FirstMessage) + kEagerBytes) {}

  void post();
  // Ends the message in this thread, or waits for the thread that does. After `at_most` the group
  // is aborted.
  void run(ipc::Deadline at_most = ipc::Deadline::max());
  bool is_eager() const { return envelope_.bytes <= kEagerBytes; }
  void start();  // runs the message in a thread of its own, unless a thread does so already
  bool is_done() const { return is(State::done); }
  bool is_running() const { return is(State::running); }

  TensorStaging* staging() const override { return nullptr; }  // host tensors only
  int sourceRank() const override { return *op_.peer; }
  Tensors result() override { return {op_.tensor}; }
  void synchronize() override { wait(); }
  bool isCompleted() override {
    all_->fork_guard_.require_not_forked(name_);
    start();
    return is_done();
  }
  bool isSuccess() const override { return is_done() && !exception(); }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override { all_->group_->abort(text("abort() was called on a ", name_)); }
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

 private:
  enum class State { posted, running, done };
  bool is(State state) const {
    const std::lock_guard lock(mutex_);
    return state_ == state;
  }
  void post_send();
  void finish_send();
  void finish_receive();
  bool matches(const ipc::Envelope& sent) const {
    return sent.bytes == envelope_.bytes && sent.dtype == envelope_.dtype;
  }
  void await(const ProcessGroupWire::PendingPtr& pending);
  ipc::OpContext context() const { return {name_, number_, deadline_}; }
  ipc::Wire::Owner self() {
    using Ptr = c10::intrusive_ptr<RemoteMessage>;
    return std::make_shared<Ptr>(Ptr::unsafe_reclaim_from_nonowning(this));
  }

  const std::shared_ptr<RemoteMessages> all_;
  const P2POp op_;
  const uint64_t number_;
  const char* const name_;
  const bool receives_;
  const ipc::Envelope envelope_;
  ipc::Deadline deadline_ = ipc::deadline_after(op_.timeout);
  at::Tensor dense_;  // the tensor, or a contiguous copy
  std::byte* memory_ = nullptr;
  std::vector<std::byte> first_, unused_;  // `unused_`: data that does not match
  ipc::Envelope answer_{};                 // the receiver's envelope, of a message with large data
  std::vector<ProcessGroupWire::PendingPtr> posted_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::posted;
  bool threaded_ = false;  // a thread has been started to run the message
  std::exception_ptr error_;
  c10::intrusive_ptr<Future> future_;
};

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
    if (state_ != State::posted) return changed_.wait(lock, [&] { return state_ == State::done; });
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
  all_->start(c10::intrusive_ptr<RemoteMessage>::unsafe_reclaim_from_nonowning(this));
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

RemoteMessages::RemoteMessages(std::shared_ptr<ipc::Group> group, ipc::HostsLink link,
                               std::shared_ptr<ProcessGroupWire> wire)
    : group_(std::move(group)), link_(std::move(link)), wire_(std::move(wire)) {}

RemoteMessages::~RemoteMessages() = default;

WorkPtr RemoteMessages::submit(const P2POp& op, const char* name, bool receives) {
  fork_guard_.require_not_forked(name);
  require(op.tag < kTags, name, ": tag is ", op.tag, "; between hosts it must be less than ",
          kTags);
  const InFlightGuard in_flight;
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    if (!accepting_) throw CollectiveError(text(name, ": the group has been destroyed"));
    number = next_number_++;
  }
  const auto message =
      c10::make_intrusive<RemoteMessage>(shared_from_this(), op, number, name, receives);
  link_.run(*group_, {name, number, ipc::deadline_after(op.timeout)}, *op.peer,
            [&] { wire_->await_connected(*op.peer, ipc::deadline_after(op.timeout)); });
  {
    const std::lock_guard posting(posting_mutex_);
    message->post();
  }
  {
    const std::lock_guard lock(mutex_);
    open_.push_back(message);
  }
  if (receives && !message->is_eager()) message->start();  // the sender may wait for this rank
  return message;
}

WorkPtr RemoteMessages::send(const P2POp& op) { return submit(op, "send", false); }
WorkPtr RemoteMessages::receive(const P2POp& op) { return submit(op, "recv", true); }

void RemoteMessages::start(const MessagePtr& message) {
  join_ended();
  const std::lock_guard lock(mutex_);
  MessageThread& made = threads_.emplace_back();
  try {
    made.thread = ipc::new_thread([this, &made, message = message]() mutable {
      message->run();
      message.reset();  // may release a tensor, which may take the GIL
      const std::lock_guard ending(mutex_);
      made.ended = true;
      changed_.notify_all();
    });
  } catch (const std::exception&) {
    threads_.pop_back();
  }
}

void RemoteMessages::join_ended() {
  std::list<MessageThread> ended;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = threads_.begin(); it != threads_.end();) {
      const auto next = std::next(it);
      if (it->ended) ended.splice(ended.end(), threads_, it);
      it = next;
    }
  }
  for (MessageThread& each : ended) each.thread.join();
}

void RemoteMessages::forget(const RemoteMessage* message) {
  MessagePtr released;  // without the mutex: it may hold the last reference
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const auto& open) { return open.get() == message; });
  if (found == open_.end()) return;
  released = std::move(*found);
  open_.erase(found);
}

void RemoteMessages::close(ipc::Deadline deadline) {
  std::vector<MessagePtr> open;
  std::unique_lock lock(mutex_);
  accepting_ = false;
  open = open_;
  lock.unlock();
  const auto all_ended = [&] {
    return std::all_of(threads_.begin(), threads_.end(), [](const auto& t) { return t.ended; });
  };
  for (const auto& message : open)
    if (!message->is_running()) message->run(deadline);
  lock.lock();
  if (!changed_.wait_until(lock, deadline, all_ended)) {
    lock.unlock();
    group_->abort("it was destroyed while messages were under way");
    wire_->abort();
    lock.lock();
    changed_.wait(lock, all_ended);
  }
  lock.unlock();
  join_ended();
}

namespace {

class MessagesOfHosts final : public PointToPoint {
 public:
  MessagesOfHosts(std::shared_ptr<PointToPoint> local, std::shared_ptr<RemoteMessages> remote,
                  const Hosts& hosts, Rank me, std::shared_ptr<DeviceOps> devices)
      : local_(std::move(local)),
        remote_(std::move(remote)),
        hosts_(hosts),
        me_(me),
        devices_(std::move(devices)) {}

  WorkPtr send(const P2POp& op) override {
    check(op, "send", false);
    return is_remote(op) ? remote_->send(op) : local_->send(within_host(op));
  }
  WorkPtr receive(const P2POp& op) override {
    check(op, "recv", true);
    return is_remote(op) ? remote_->receive(op) : local_->receive(within_host(op));
  }
  bool check(const P2POp& op, const char* name, bool receives) const override {
    require(op.peer.has_value(), name,
            ": a group over several hosts cannot receive from any rank; pass the source rank");
    const bool on_device = check_message(op, name, receives, hosts_.world(), *devices_);
    require(!on_device || !is_remote(op), name, ": the tensor is on ", op.tensor.device(),
            " and rank ", *op.peer, " is on another host, to which only CPU tensors can be sent; ",
            "pass .cpu()");
    return on_device;
  }

 private:
  bool is_remote(const P2POp& op) const { return hosts_.of(*op.peer) != hosts_.of(me_); }
  P2POp within_host(P2POp op) const {
    op.peer = hosts_.index(*op.peer);
    return op;
  }

  const std::shared_ptr<PointToPoint> local_;
  const std::shared_ptr<RemoteMessages> remote_;
  const Hosts& hosts_;
  const Rank me_;
  const std::shared_ptr<DeviceOps> devices_;
};

}  // namespace

std::shared_ptr<PointToPoint> messages_of_hosts(std::shared_ptr<PointToPoint> local,
                                                std::shared_ptr<RemoteMessages> remote,
                                                const Hosts& hosts, Rank me,
                                                std::shared_ptr<DeviceOps> devices) {
  return std::make_shared<MessagesOfHosts>(std::move(local), std::move(remote), hosts, me,
                                           std::move(devices));
}

}  // namespace pycollect::dist
