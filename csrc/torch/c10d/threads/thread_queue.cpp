// See thread_queue.h.
#include "thread_queue.h"

#include "../../../plan/error.h"
#include "../gil.h"

namespace pycollect::dist {

void ThreadQueue::require_open(const char* operation) const {
  if (closed_) throw CollectiveError(text(operation, ": the group has been destroyed"));
}

void ThreadQueue::run(const CollectiveWorkPtr& work) {
  const GilRelease gil_release;
  push_all({work});
  await(*work);
  if (const auto error = work->exception()) std::rethrow_exception(error);
}

void ThreadQueue::push_all(const std::vector<CollectiveWorkPtr>& works) {
  const GilRelease gil_release;
  if (works.empty()) return;
  require_open(works.front()->name());
  group_->require_healthy(rank_, works.front()->name());
  for (const CollectiveWorkPtr& work : works) work->enqueue(shared_from_this());
  if (group_->post(rank_, {.works = works})) has_run_ = true;
}

void ThreadQueue::refuse(const CollectiveWorkPtr& work) {
  const GilRelease gil_release;
  group_->post(rank_, {.refused = work});
}

ThreadGroup::GroupWait ThreadQueue::until_done(GroupWork& of, ipc::Deadline deadline,
                                               bool is_limited) const {
  auto& work = static_cast<CollectiveWork&>(of);
  return {work, [this, &work] { return group_->missing(work); },
          [this, &work] { return group_->describe(work); }, deadline, is_limited};
}

// A rank that has run calls of all ranks continues after those before it.
void ThreadQueue::yield_in_order() {
  const GilRelease gil_release;
  if (has_run_.exchange(false)) group_->yield_in_order(rank_);
}

void ThreadQueue::await(GroupWork& work) {
  yield_in_order();
  ThreadOwner::wait(work);
}

void ThreadQueue::wait(GroupWork& work) {
  if (work.is_done())
    yield_in_order();
  else
    await(work);
}

bool ThreadQueue::wait_until(GroupWork& work, ipc::Deadline deadline) {
  const bool is_done = work.is_done();
  yield_in_order();
  return is_done || ThreadOwner::wait_until(work, deadline);
}

std::vector<Rank> ThreadQueue::missing() {
  const GilRelease gil_release;
  const std::lock_guard lock(mutex());
  return group_->missing();
}

std::vector<Rank> ThreadQueue::behind() {
  const GilRelease gil_release;
  const std::lock_guard lock(mutex());
  return group_->behind(rank_);
}

}  // namespace pycollect::dist
