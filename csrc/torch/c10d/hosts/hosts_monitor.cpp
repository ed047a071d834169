// See hosts_monitor.h.
#include "hosts_monitor.h"

#include <pthread.h>

#include "../../../group/system.h"

namespace pycollect::dist {

// Causes so short that a string of them needs no memory.
constexpr char kNoMemory[] = "lack of memory", kNoThread[] = "lack of threads";

HostsMonitor::HostsMonitor(std::shared_ptr<ipc::Group> group, std::shared_ptr<GlooChannel> channel,
                           std::function<void()> tick)
    : group_(std::move(group)), channel_(std::move(channel)), tick_(std::move(tick)) {
  try {
    monitor_thread_ = ipc::new_thread([this] { serve(); });
    if (group_->rank() == 0) watching_thread_ = ipc::new_thread([this] { watch(); });
  } catch (...) {
    group_->abort({ipc::AbortRecord::lost, kNoThread});
    stop();
    throw;
  }
}

HostsMonitor::~HostsMonitor() { stop(); }

void HostsMonitor::stop() {
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
  }
  changed_.notify_all();
  end();
  for (std::thread* thread : {&monitor_thread_, &watching_thread_})
    if (thread->joinable()) thread->join();
}

void HostsMonitor::end() {
  if (group_->is_healthy()) return channel_->close({ipc::AbortRecord::healthy});
  ipc::AbortCause why{ipc::AbortRecord::lost, kNoMemory};
  try {
    why = group_->abort_cause();
  } catch (const std::bad_alloc&) {
  }
  channel_->close(why);
}

void HostsMonitor::serve() {
  pthread_setname_np(pthread_self(), "pycollect hosts");
  tick_();  // posts receives: torch allocates this thread's data, as there may be no memory later
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait_for(lock, ipc::kSignalInterval,
                      [this] { return left_ || !group_->is_healthy(); });
    if (left_) return;
    lock.unlock();
    channel_->look_at_waits();
    try {
      group_->abort_if_died();
    } catch (const std::bad_alloc&) {  // the next look may have memory for the cause
    }
    if (!group_->is_healthy()) return end();
    tick_();
    lock.lock();
  }
}

void HostsMonitor::watch() {
  pthread_setname_np(pthread_self(), "pycollect watch");
  const Hosts& hosts = channel_->hosts();
  const int here = hosts.of(group_->world_rank(group_->rank()));
  const Rank next = hosts.ranks((here + 1) % hosts.count())[0];
  const auto is_over = [this] {
    const std::lock_guard lock(mutex_);
    return left_ || !group_->is_healthy();
  };
  const auto await_end = [&] {
    try {
      channel_->await_goodbye(next);
    } catch (const ipc::ChannelFailure& failure) {
      if (!is_over()) return channel_->cause_of(*group_, next, failure);
    }
    return channel_->goodbye_of(next).value_or(ipc::AbortCause{ipc::AbortRecord::healthy});
  };
  ipc::AbortCause cause{ipc::AbortRecord::lost, kNoMemory};
  try {
    cause = await_end();
  } catch (const std::bad_alloc&) {
  }
  if (cause.kind == ipc::AbortRecord::healthy || is_over()) return;
  group_->abort(cause);
  changed_.notify_all();
}

}  // namespace pycollect::dist
