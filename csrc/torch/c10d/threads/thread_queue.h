// Queue of one rank that is a thread: its calls go to the group, and waiting for one lets other
// ranks run.
#pragma once
#include "thread_group.h"

namespace pycollect::dist {

class ThreadQueue final : public CallQueue {
 public:
  ThreadQueue(std::shared_ptr<ThreadGroup> group, Rank rank)
      : group_(std::move(group)), rank_(rank) {}

  void run(const CollectiveWorkPtr& work) override;
  void push_all(const std::vector<CollectiveWorkPtr>& works) override;
  void refuse(const CollectiveWorkPtr& work) override;

  void wait(GroupWork& work) override;
  bool wait_until(GroupWork& work, ipc::Deadline deadline) override;
  void progress(GroupWork& work) override;
  void on_future_taken() override { group_->count_open_futures(1); }
  void abort(const std::string& why) override { group_->abort(rank_, why); }
  std::vector<Rank> missing() override;
  std::vector<Rank> behind() override;
  std::mutex& mutex() override { return group_->mutex(); }
  void close() { closed_ = true; }

 private:
  void require_open(const char* operation) const;
  void yield_in_order();
  void await(GroupWork& work);
  ThreadGroup::GroupWait until_done(GroupWork& work, ipc::Deadline deadline, bool is_limited) const;

  const std::shared_ptr<ThreadGroup> group_;
  const Rank rank_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> has_run_{false};  // calls of all ranks, since this rank has waited
};

}  // namespace pycollect::dist
