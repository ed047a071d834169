// Queue of one rank that is a thread: its calls go to the group, and waiting for one lets other
// ranks run.
#pragma once
#include "thread_group.h"

namespace pycollect::dist {

class ThreadQueue final : public ThreadOwner<CallQueue> {
 public:
  using ThreadOwner::ThreadOwner;

  void run(const CollectiveWorkPtr& work) override;
  void push_all(const std::vector<CollectiveWorkPtr>& works) override;
  void refuse(const CollectiveWorkPtr& work) override;

  void wait(GroupWork& work) override;
  bool wait_until(GroupWork& work, ipc::Deadline deadline) override;
  std::vector<Rank> missing() override;
  std::vector<Rank> behind() override;
  void close() { closed_ = true; }

 private:
  void require_open(const char* operation) const;
  void yield_in_order();
  void await(GroupWork& work);
  ThreadGroup::GroupWait until_done(GroupWork& work, ipc::Deadline deadline,
                                    bool is_limited) const override;

  std::atomic<bool> closed_{false};
  std::atomic<bool> has_run_{false};  // calls of all ranks, since this rank has waited
};

}  // namespace pycollect::dist
