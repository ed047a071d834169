// See backend.h: how a group ends, by itself, when it is shut down, or with the process.
#include <algorithm>
#include <set>
#include <thread>

#include "../../plan/error.h"
#include "../job.h"
#include "backend.h"
#include "under_way.h"
#include "without_interpreter.h"

namespace pycollect::dist {
namespace {

// What fire-and-forget calls get to finish in before the group is aborted: much more than they take
// when the other ranks are there, much less than anybody waits for a process to end.
constexpr std::chrono::milliseconds kGrace{5000};
// What threads get that wake when the groups end: they have nothing to do but to raise. Those that
// end a group themselves have the time of grace before that.
constexpr std::chrono::milliseconds kWaking{1000};

void warn_of(const std::exception_ptr& untold) {
  if (!untold) return;
  try {
    std::rethrow_exception(untold);
  } catch (const std::exception& error) {
    warn(
        text("a collective of CUDA tensors has failed, and its results are wrong: ", error.what()));
  }
}

// Every backend of this process, for its end.
struct Living {
  std::mutex mutex;
  std::set<Backend*> all;
};
Living& living() {
  static auto* const one = new Living;  // outlives whatever is destroyed late
  return *one;
}

}  // namespace

void Backend::begin_life() {
  const std::lock_guard lock(living().mutex);
  living().all.insert(this);
}

Backend::~Backend() {
  if (!forks_.none()) {
    // Locks and threads in there are the parent's: not even their destructors may run.
    new auto(std::make_tuple(std::move(queue_), std::move(messages_), std::move(group_),
                             std::move(allocator_), std::move(coalescing_), ladder_));
    return;
  }
  const UnderWay under_way;  // until it has the interpreter's lock again
  const WithoutInterpreter without;
  {
    const std::lock_guard lock(living().mutex);
    living().all.erase(this);
  }
  warn_of(close(shm::Clock::now() + kGrace));
}

// What was asked for without waiting for the device, and has failed there, has no other place left
// to say so.
void Backend::shutdown() {
  const UnderWay under_way;
  if (!forks_.none()) return;
  if (const auto untold = close(shm::Clock::now() + kGrace)) std::rethrow_exception(untold);
}

std::exception_ptr Backend::close(shm::Deadline deadline) {
  const WithoutInterpreter without;
  queue_->close(deadline);
  const std::exception_ptr untold = ladder_->close(kGrace);
  std::shared_ptr<Messages> messages;
  std::shared_ptr<shm::Group> group;
  std::shared_ptr<ArenaAllocator> allocator;
  {
    const std::lock_guard lock(life_);
    messages.swap(messages_);
    group.swap(group_);
    allocator.swap(allocator_);
  }
  if (messages) messages->close(deadline);
  if (group) {
    ladder_->leave();
    group->leave();  // works that somebody holds on to may keep it
  }
  return queue_->has_failed() ? nullptr : untold;
}

// A callback may drop the last hold of a group, whose end wants the lock. All of them move on by
// themselves meanwhile, and so have one time of grace together.
bool close_groups() {
  const bool wakes = UnderWay::any();
  std::vector<c10::intrusive_ptr<Backend>> all;
  {
    const std::lock_guard lock(living().mutex);
    for (Backend* b : living().all)  // none: it is about to end already
      if (Backend* held = c10::raw::weak_intrusive_ptr::lock(b))
        all.push_back(c10::intrusive_ptr<Backend>::reclaim(held));
  }
  const auto deadline = shm::Clock::now() + kGrace;
  for (const auto& b : all)
    if (b->forks_.none()) warn_of(b->close(deadline));
  const auto patience = std::max(shm::Clock::now(), deadline) + kWaking;
  while (UnderWay::any() && shm::Clock::now() < patience)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return wakes;
}

}  // namespace pycollect::dist
