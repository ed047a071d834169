// send and recv between processes. Every message makes progress by itself, independently of
// collectives. A waiting thread moves all messages; if none waits, a service thread does, which
// starts before the first message. A send from a device is posted once its data is in host memory,
// in order with other sends to the same peer; a large one goes in fragments, as they arrive. Device
// copies ring no doorbell, so waiting threads poll while any copy is pending.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../../group/fork_guard.h"
#include "../../send_recv/mailbox.h"
#include "point_to_point.h"
#include "staging/message_staging.h"
#include "staging/transport_selector.h"
#include "work.h"

namespace pycollect::dist {

class Messages;

class MessageWork final : public GroupWork {
 public:
  struct MessageInfo {
    const char* name;
    uint64_t number;
    std::optional<Rank> peer;
    int tag;
    std::chrono::milliseconds timeout;
    bool receives;
  };
  // `staging` stages a device tensor; null: a host tensor.
  MessageWork(const MessageInfo& info, at::Tensor tensor, std::shared_ptr<TensorStaging> staging,
              std::shared_ptr<Messages> messages);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  Tensors result() override { return {tensor_}; }
  TensorStaging* staging() const override { return staging_.get(); }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

 private:
  friend class Messages;
  std::string describe() const;
  ipc::Envelope envelope() const;
  Rank peer() const;
  // Posts the message to the mailbox.
  void post(ipc::Mailbox& mailbox);
  // Passes on the fragments of a staged message that have arrived. Returns whether more will come.
  bool advance(ipc::Mailbox& mailbox);
  bool supply(ipc::Mailbox& mailbox);
  void fail(std::exception_ptr error);  // for an error before the message is posted
  ipc::TransferPtr transfer() const;
  bool is_moved() const;                             // true also after a failure
  bool is_moved_or_due(ipc::Deadline before) const;  // true also after a failure
  void finish();  // throws the transfer's error, or copies the data to the tensor
  // Completes a message that was moved or has failed. Thread-safe, and may be called repeatedly.
  void settle();
  std::shared_ptr<Messages> messages() const;
  std::vector<Rank> missing(const ipc::Mailbox& mailbox) const;  // ranks that it depends on
  ipc::Deadline due() const;  // deadline of its future; Deadline::max() without a future
  ipc::OpContext context(ipc::Deadline deadline) const {
    return {info_.name, info_.number, deadline};
  }

  const MessageInfo info_;
  const at::Tensor tensor_;
  const std::shared_ptr<TensorStaging> staging_;
  MessageStaging* const fragments_;  // `staging_`, if the message goes in fragments; else null
  at::Tensor dense_;                 // the tensor, or a contiguous copy
  std::byte* memory_ = nullptr;
  std::shared_ptr<Messages> messages_;   // null once the message is settled
  const std::vector<Rank> world_ranks_;  // see GroupSettings
  ipc::TransferPtr transfer_;            // null until the message is posted
  mutable std::mutex mutex_;
  bool settled_ = false;
  bool device_pending_ = false;  // true: the next fragment is still on this rank's device
  std::exception_ptr error_;
  std::exception_ptr failure_;  // a device error, while the mailbox uses the memory
  c10::intrusive_ptr<Future> future_;
  ipc::Deadline due_ = ipc::Deadline::max();
};

class Messages final : public PointToPoint, public std::enable_shared_from_this<Messages> {
 public:
  // `remote`: the ranks on other hosts, if there are any. Messages name peers by their ranks.
  Messages(std::shared_ptr<ipc::Group> group, std::shared_ptr<const TransportSelector> selector,
           std::shared_ptr<ipc::RemotePeers> remote = nullptr);

  WorkPtr send(const P2POp& op) override;
  WorkPtr receive(const P2POp& op) override;
  bool check(const P2POp& op, const char* name, bool receives) const override;
  // Refuses new messages and lets pending ones finish until the deadline. If any are left then,
  // aborts the group, which fails them.
  void close(ipc::Deadline deadline);
  void abort(const std::string& why) { group_->abort(why); }
  const ipc::Group& group() const { return *group_; }
  bool progress();  // returns true if any message has moved

 private:
  friend class MessageWork;
  using Lock = std::unique_lock<std::mutex>;
  class PostingScope;  // defined in messages.cpp
  WorkPtr submit(const P2POp& op, const char* name, bool receives);
  std::optional<Rank> mailbox_peer(std::optional<Rank> rank) const;
  bool is_gone(Rank peer, uint64_t gone) const {  // `gone`: as Group::gone returns
    return peer < group_->world() ? (gone >> peer & 1) != 0 : mailbox_.is_gone(peer);
  }
  WorkPtr track(c10::intrusive_ptr<MessageWork> work);
  using MissingRanks = std::function<std::vector<Rank>()>;
  // Moves all messages until `done` returns true; `transfer`, if given, is the awaited transfer.
  // Throws what Mailbox::wait throws.
  void await(const std::function<bool()>& done, const MissingRanks& missing,
             ipc::Transfer* transfer, const ipc::OpContext& context);
  void wait(MessageWork& work, ipc::Deadline deadline);
  bool wait_until(MessageWork& work, ipc::Deadline deadline);
  void forget(const MessageWork& work);  // removes a settled message
  bool settle_done(Lock& lock);
  void await_any(Lock& lock);
  void serve();

  void stop_accepting(ipc::Deadline deadline);
  void finish(ipc::Deadline deadline);
  void end_thread();

  void post(const c10::intrusive_ptr<MessageWork>& work);
  std::shared_ptr<TensorStaging> staging_of(const at::Tensor& tensor) const;
  void fail_with_group();
  void advance_staged();
  bool polls() const { return any_pending_send_ || any_device_send_; }

  void dispatch(const c10::intrusive_ptr<MessageWork>& work);
  void dispatch_arrived();
  bool try_post(const c10::intrusive_ptr<MessageWork>& work);
  void drop_pending_sends(const std::exception_ptr& error);
  bool any_moved_or_due(ipc::Deadline before) const;
  ipc::OpContext most_urgent() const;
  bool waiters_suffice() const;
  std::vector<Rank> missing(const MessageWork& work, uint64_t gone) const;
  std::vector<Rank> missing();

  const std::shared_ptr<ipc::Group> group_;
  const std::shared_ptr<const TransportSelector> selector_;
  // Device operations on streams of their own: messages must not wait for work of the collectives.
  const std::shared_ptr<DeviceOps> devices_;
  ipc::Mailbox mailbox_;
  const ipc::ForkGuard fork_guard_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<c10::intrusive_ptr<MessageWork>> open_;  // messages not done when last checked
  std::thread thread_;
  int waiting_ = 0;  // threads that wait for a message, and move all messages
  int posting_ = 0;  // threads inside submit()
  bool accepting_ = true, closed_ = false, polling_ = false;
  uint64_t next_number_ = 0;

  std::mutex pending_mutex_;  // held while posting to the mailbox; never locked under mutex_
  std::deque<c10::intrusive_ptr<MessageWork>> pending_sends_;  // sends that are not posted yet
  std::atomic<bool> any_pending_send_{false};                  // pending_sends_ is not empty

  // staged_mutex_ is only try-locked under mutex_. Under staged_mutex_, only a work's own mutex and
  // the mailbox's are locked.
  std::mutex staged_mutex_;
  std::vector<c10::intrusive_ptr<MessageWork>> staged_;  // posted, but not all fragments passed on
  std::atomic<bool> any_staged_{false};
  std::atomic<bool> any_device_send_{false};  // whether any of staged_ is a send
};

}  // namespace pycollect::dist
