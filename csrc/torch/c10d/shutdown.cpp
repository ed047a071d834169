// The end of a group: in Backend's destructor, in shutdown(), or at process exit.
#include <algorithm>
#include <set>
#include <thread>

#include "backend.h"
#include "interpreter.h"

namespace pycollect::dist {
namespace {

// Shutdown timeout: the time for fire-and-forget calls to finish before the group is aborted. Much
// longer than they take with all ranks present, much shorter than users wait for an exit.
constexpr std::chrono::milliseconds kShutdownTimeout{5000};
// Time limit for threads that wake when the groups close, and then only raise an error. Threads
// that close a group themselves have the shutdown timeout before that.
constexpr std::chrono::milliseconds kWakeTimeout{1000};

// Every backend of this process, for close_groups().
struct LiveBackends {
  std::mutex mutex;
  std::set<Backend*> all;
};
LiveBackends& live_backends() {
  static auto* const one = new LiveBackends;  // never freed: backends may be destroyed late
  return *one;
}

}  // namespace

void Backend::register_backend() {
  const std::lock_guard lock(live_backends().mutex);
  live_backends().all.insert(this);
}

Backend::~Backend() {
  if (fork_guard_.forked()) {
    // Deliberate leak in a forked child: the parent's locks and threads must not be destroyed.
    new auto(std::make_pair(std::move(connection_), std::move(coalescing_)));
    return;
  }
  const InFlightGuard in_flight;  // counts until this thread has retaken the GIL
  const SignalsDeferred deferred;
  const GilRelease gil_release;
  {
    const std::lock_guard lock(live_backends().mutex);
    live_backends().all.erase(this);
  }
  connection_->close(ipc::Clock::now() + kShutdownTimeout);
}

// Throws what a signal handler raised meanwhile.
void Backend::shutdown() {
  const InFlightGuard in_flight;
  if (fork_guard_.forked()) return;
  const GilRelease gil_release;
  if (const auto raised = connection_->close(ipc::Clock::now() + kShutdownTimeout))
    std::rethrow_exception(raised);
  connection_->await_end_of_store();
}

// A callback may drop the last reference to a group, whose destructor locks this mutex; so the
// groups are closed without the lock. All make progress meanwhile, and share one shutdown timeout.
bool close_groups() {
  const bool any_in_flight = InFlightGuard::any();
  std::vector<c10::intrusive_ptr<Backend>> all;
  {
    const std::lock_guard lock(live_backends().mutex);
    for (Backend* b : live_backends().all)  // null: its destructor has begun
      if (Backend* held = c10::raw::weak_intrusive_ptr::lock(b))
        all.push_back(c10::intrusive_ptr<Backend>::reclaim(held));
  }
  const auto deadline = ipc::Clock::now() + kShutdownTimeout;
  const SignalsDeferred deferred;
  for (const auto& b : all)
    if (!b->fork_guard_.forked()) b->connection_->close(deadline);
  const auto wake_deadline = std::max(ipc::Clock::now(), deadline) + kWakeTimeout;
  while (InFlightGuard::any() && ipc::Clock::now() < wake_deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return any_in_flight;
}

}  // namespace pycollect::dist
