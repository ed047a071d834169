// See hosts_monitor.h.
#include "hosts_monitor.h"

#include <pthread.h>

#include "../../../group/new_thread.h"

namespace pycollect::dist {
namespace {

// A tenth of the time within which all ranks of all hosts must notice a death.
constexpr std::chrono::milliseconds kInterval{200};

}  // namespace

HostsMonitor::HostsMonitor(std::shared_ptr<ipc::Group> group,
                           std::shared_ptr<ProcessGroupWire> wire,
                           std::shared_ptr<const CauseBoard> board)
    : group_(std::move(group)), wire_(std::move(wire)), board_(std::move(board)) {
  thread_ = ipc::new_thread([this] { serve(); });
}

HostsMonitor::~HostsMonitor() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void HostsMonitor::serve() {
  pthread_setname_np(pthread_self(), "pycollect hosts");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kInterval, [this] { return closed_; })) {
    group_->abort_if_died();
    if (group_->is_healthy()) continue;
    lock.unlock();
    board_->publish(group_->abort_cause());
    return wire_->abort();
  }
}

}  // namespace pycollect::dist
