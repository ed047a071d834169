// send and recv between ranks that are threads: a message is copied from tensor to tensor as soon
// as both sides have posted it. A small send is done at once, as between processes.
#pragma once
#include <deque>

#include "../work.h"
#include "thread_group.h"

namespace pycollect::dist {

// The messages of a group that wait for their other side, in the order in which they were posted.
class ThreadMailbox {
 public:
  explicit ThreadMailbox(ThreadGroup& group) : group_(group) {}
  void post(const MessageWorkPtr& work);
  std::string describe(const MessageWork& work) const;
  // Returns the ranks that have not posted their side.
  static std::vector<Rank> needed(const MessageWork& work);
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
  void await_arrival(const MessageWorkPtr& receive, const at::Tensor& pinned,
                     const std::shared_ptr<DeviceEvent>& arrival);
  void end_arrival(const MessageWorkPtr& receive, const at::Tensor& pinned,
                   std::exception_ptr error);
  void deliver(const MessageWorkPtr& send, const MessageWorkPtr& receive);
  void finish(const MessageWorkPtr& work, const std::exception_ptr& error);

  ThreadGroup& group_;
  // Guarded by the group's mutex. Data for the receives in `arriving_` is on its way.
  std::deque<MessageWorkPtr> sends_, receives_, arriving_;
};

}  // namespace pycollect::dist
