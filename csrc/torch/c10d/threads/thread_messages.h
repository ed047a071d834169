// send and recv between ranks that are threads: a message is copied from tensor to tensor as soon
// as both sides have posted it. A send of at most kEagerBytes is done at once, as between
// processes.
#pragma once
#include <deque>

#include "../point_to_point.h"
#include "thread_group.h"

namespace pycollect::dist {

// The messages of a group that wait for their other side, in the order in which they were posted.
class ThreadMailbox {
 public:
  explicit ThreadMailbox(ThreadGroup& group) : group_(group) {}
  void post(const MessageWorkPtr& work);
  std::string describe(const MessageWork& work) const;
  using ErrorOfOperation = std::function<std::exception_ptr(const std::string& operation)>;
  // Fails the messages that wait for their other side, or for a device. Call without the group's
  // mutex.
  void fail_all(const ErrorOfOperation& error);
  // Returns a message whose future is due at this time. Call with the group's mutex.
  std::optional<OverdueWork> find_due(ipc::Deadline now) const;

 private:
  MessageWorkPtr take_match(const MessageWork& work);
  // Returns pinned memory if the data is on its way from a device to there, else no tensor.
  at::Tensor copy(MessageWork& send, MessageWork& receive);
  void await_arrival(const MessageWorkPtr& send, const MessageWorkPtr& receive,
                     const at::Tensor& pinned);
  void end_arrival(const MessageWorkPtr& receive, const at::Tensor& pinned,
                   const DeviceEvent& arrival);
  bool take_arriving(const MessageWorkPtr& receive);
  void deliver(const MessageWorkPtr& send, const MessageWorkPtr& receive);
  void finish(const MessageWorkPtr& work, const std::exception_ptr& error);

  ThreadGroup& group_;
  // Guarded by the group's mutex. Data for the receives in `arriving_` is on its way.
  std::deque<MessageWorkPtr> sends_, receives_, arriving_;
};

class ThreadMessages final : public ThreadOwner<PointToPoint>,
                             public std::enable_shared_from_this<ThreadMessages> {
 public:
  ThreadMessages(std::shared_ptr<ThreadGroup> group, std::shared_ptr<DeviceOps> devices, Rank rank)
      : ThreadOwner(std::move(group), rank), devices_(std::move(devices)) {}

  WorkPtr post(const P2POp& op) override;
  bool check(const P2POp& op) const override;
  std::string describe(GroupWork& work) override;

 private:
  ThreadGroup::GroupWait until_done(GroupWork& work, ipc::Deadline deadline,
                                    bool is_limited) const override;

  const std::shared_ptr<DeviceOps> devices_;
  uint64_t next_number_ = 0;
};

}  // namespace pycollect::dist
