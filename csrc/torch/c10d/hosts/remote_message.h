// One message between ranks of different hosts; see remote_messages.h.
#pragma once
#include "../../../send_recv/mailbox.h"
#include "../work.h"
#include "remote_messages.h"

namespace pycollect::dist {

// Tags of messages are below this number, as every message on the wire needs a number of its own.
inline constexpr int kRemoteTags = 1 << 29;

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

  void post();  // a send: its messages; a receive: the first one
  // Ends the message in this thread; after `at_most` the group is aborted. If another thread does,
  // waits for it until `at_most`.
  void run(ipc::Deadline at_most = ipc::Deadline::max());
  bool is_eager() const { return envelope_.bytes <= kEagerBytes; }
  void start();  // runs the message in a thread of its own, unless a thread does so already
  bool is_done() const { return is(State::done); }
  bool is_running() const { return is(State::running); }
  bool receives() const { return receives_; }

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
  struct FirstMessage {
    ipc::Envelope envelope;
    int send;  // number of the send among those of its rank, modulo kSends
  };
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

}  // namespace pycollect::dist
