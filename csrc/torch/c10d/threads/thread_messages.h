// send and recv between ranks that are threads: a message is copied from tensor to tensor as soon
// as both sides have posted it. A send of at most kEagerBytes is done at once, as between
// processes.
#pragma once
#include <deque>

#include "../../../send_recv/transfer.h"
#include "../point_to_point.h"
#include "direct_staging.h"
#include "thread_group.h"

namespace pycollect::dist {

class ThreadMessageWork final : public PostedWork {
 public:
  struct ThreadMessageInfo {
    const char* name;
    uint64_t number;
    Rank rank;  // of this side
    std::optional<Rank> peer;
    int tag;
    std::chrono::milliseconds timeout;
    bool receives;
  };
  // `staging` orders a device tensor after the caller's stream; null: a host tensor.
  ThreadMessageWork(const ThreadMessageInfo& info, at::Tensor tensor,
                    std::shared_ptr<DirectStaging> staging, std::shared_ptr<ThreadMailbox> mailbox)
      : info(info),
        tensor_(std::move(tensor)),
        staging_(std::move(staging)),
        mailbox_(std::move(mailbox)) {}

  int sourceRank() const override { return peer_; }
  Tensors result() override { return {tensor_}; }
  TensorStaging* staging() const override { return staging_.get(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;

  // For the mailbox.
  const ThreadMessageInfo info;
  std::chrono::milliseconds limit() const override { return info.timeout; }
  const char* name() const override { return info.name; }
  std::string describe() const;
  std::vector<Rank> needed() const;
  ipc::Envelope envelope() const;
  bool matches(const ThreadMessageWork& send) const;  // of a receive
  void detach();  // copies the data of a send, so that the sender may reuse its tensor
  DirectStaging* direct_staging() const { return staging_.get(); }
  std::shared_ptr<ProfilerEvent> event;  // null: no profiler
  const at::Tensor& data() const { return data_.defined() ? data_ : tensor_; }
  void set_peer(Rank peer) { peer_ = peer; }

 private:
  ThreadGroup& group() const;
  ThreadGroup::GroupWait until_done(ipc::Deadline deadline, bool is_limited);
  void give_way() override;
  std::mutex& mutex() override;
  void count_open_futures(int more) override;

  const at::Tensor tensor_;
  const std::shared_ptr<DirectStaging> staging_;
  const std::shared_ptr<ThreadMailbox> mailbox_;
  at::Tensor data_;  // the copy of a detached send
  std::atomic<Rank> peer_{-1};
};
using ThreadMessagePtr = c10::intrusive_ptr<ThreadMessageWork>;

// The messages of a group that wait for their other side, in the order in which they were posted.
class ThreadMailbox : public std::enable_shared_from_this<ThreadMailbox> {
 public:
  explicit ThreadMailbox(std::shared_ptr<ThreadGroup> group) : group_(std::move(group)) {}
  // Returns the one mailbox of the group.
  static std::shared_ptr<ThreadMailbox> of(const std::shared_ptr<ThreadGroup>& group);
  ThreadGroup& group() const { return *group_; }
  void post(const ThreadMessagePtr& work);
  using ErrorOfOperation = std::function<std::exception_ptr(const std::string& operation)>;
  // Fails the messages that wait for their other side, or for a device. Call without the group's
  // mutex.
  void fail_all(const ErrorOfOperation& error);
  // Returns a message whose future is due at this time. Call with the group's mutex.
  std::optional<OverdueWork> find_due(ipc::Deadline now) const;

 private:
  ThreadMessagePtr take_match(const ThreadMessageWork& work);
  // Returns pinned memory if the data is on its way from a device to there, else no tensor.
  at::Tensor copy(ThreadMessageWork& send, ThreadMessageWork& receive);
  void await_arrival(const ThreadMessagePtr& send, const ThreadMessagePtr& receive,
                     const at::Tensor& pinned);
  void end_arrival(const ThreadMessagePtr& receive, const at::Tensor& pinned,
                   const DeviceEvent& arrival);
  bool take_arriving(const ThreadMessagePtr& receive);
  void deliver(const ThreadMessagePtr& send, const ThreadMessagePtr& receive);
  void finish(const ThreadMessagePtr& work, const std::exception_ptr& error);

  const std::shared_ptr<ThreadGroup> group_;
  // Guarded by the group's mutex. Data for the receives in `arriving_` is on its way.
  std::deque<ThreadMessagePtr> sends_, receives_, arriving_;
};

class ThreadMessages final : public PointToPoint {
 public:
  ThreadMessages(std::shared_ptr<ThreadMailbox> mailbox, std::shared_ptr<DeviceOps> devices,
                 Rank rank)
      : mailbox_(std::move(mailbox)), devices_(std::move(devices)), rank_(rank) {}

  WorkPtr send(const P2POp& op) override { return submit(op, "send", false); }
  WorkPtr receive(const P2POp& op) override { return submit(op, "recv", true); }
  bool check(const P2POp& op, const char* name, bool receives) const override;

 private:
  WorkPtr submit(const P2POp& op, const char* name, bool receives);

  const std::shared_ptr<ThreadMailbox> mailbox_;
  const std::shared_ptr<DeviceOps> devices_;
  const Rank rank_;
  uint64_t next_number_ = 0;
};

}  // namespace pycollect::dist
