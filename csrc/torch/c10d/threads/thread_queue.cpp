// See thread_queue.h.
#include "thread_queue.h"

#include <algorithm>

#include "../../../plan/error.h"
#include "../gil.h"

namespace pycollect::dist {

void ThreadQueue::require_open(const char* operation) const {
  if (closed_) throw CollectiveError(text(operation, ": the group has been destroyed"));
}

CollectiveWorkPtr ThreadQueue::run(GroupCall&& call) {
  const GilRelease gil_release;
  require_open(call.name);
  group_->require_healthy(rank_, call.name);
  const auto work = c10::make_intrusive<CollectiveWork>(std::move(call), shared_from_this());
  if (group_->post(rank_, {.works = {work}})) has_run_ = true;
  await(*work);
  if (const auto error = work->exception()) std::rethrow_exception(error);
  return work;
}

std::vector<CollectiveWorkPtr> ThreadQueue::push_all(std::vector<GroupCall> calls) {
  const GilRelease gil_release;
  RankCalls posted;
  if (calls.empty()) return {};
  require_open(calls.front().name);
  group_->require_healthy(rank_, calls.front().name);
  for (GroupCall& call : calls)
    posted.works.push_back(
        c10::make_intrusive<CollectiveWork>(std::move(call), shared_from_this()));
  std::vector<CollectiveWorkPtr> works = posted.works;
  if (group_->post(rank_, std::move(posted))) has_run_ = true;
  return works;
}

void ThreadQueue::refuse(GroupCall&& call) {
  const GilRelease gil_release;
  RankCalls posted;
  posted.refused = std::move(call);
  group_->post(rank_, std::move(posted));
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
  group_->wait(rank_, until_done(work, ipc::deadline_after(work.limit()), false));
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
  return is_done || group_->wait_until(rank_, until_done(work, deadline, true));
}

void ThreadQueue::progress(GroupWork& work) {
  group_->give_way(rank_, until_done(work, ipc::Deadline::max(), false));
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
