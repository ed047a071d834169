// See hosts_monitor.h.
#include "hosts_monitor.h"

#include <pthread.h>

#include "../../../group/new_thread.h"

namespace pycollect::dist {
namespace {

// A tenth of the time within which all ranks of all hosts must notice a death.
constexpr std::chrono::milliseconds kInterval{200};

// How long a rank that finds a connection closed waits for the cause.
constexpr std::chrono::milliseconds kCauseTime{500};

// How long a rank that leaves waits until the host that watches it knows.
constexpr std::chrono::milliseconds kFarewellTime{500};

}  // namespace

HostsMonitor::HostsMonitor(std::shared_ptr<ipc::Group> group,
                           std::shared_ptr<ProcessGroupWire> wire,
                           std::shared_ptr<const CauseBoard> board, ipc::HostsLink link)
    : group_(std::move(group)),
      wire_(std::move(wire)),
      board_(std::move(board)),
      link_(std::move(link)) {
  monitor_thread_ = ipc::new_thread([this] { serve(); });
  if (group_->rank() == 0) watching_thread_ = ipc::new_thread([this] { watch(); });
}

HostsMonitor::~HostsMonitor() {
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
  }
  changed_.notify_all();
  wire_->abort();
  monitor_thread_.join();
  if (watching_thread_.joinable()) watching_thread_.join();
}

Rank HostsMonitor::first_rank(int hosts_after) const {
  const Hosts& hosts = *link_.hosts;
  const int here = hosts.of(group_->world_rank(group_->rank()));
  return hosts.ranks((here + hosts_after) % hosts.count())[0];
}

void HostsMonitor::leave() {
  if (!group_->is_healthy()) return board_->publish(group_->abort_cause());
  if (group_->rank() != 0) return;
  try {
    const ipc::Deadline soon = ipc::Clock::now() + kFarewellTime;
    const auto farewell = std::make_shared<std::byte>();
    const Rank before = first_rank(link_.hosts->count() - 1);
    wire_->await(
        wire_->post_send(before, ProcessGroupWire::kFarewell, farewell.get(), 1, soon, farewell),
        soon);
  } catch (const ipc::WireFailure&) {
    // That host has left or died.
  }
}

void HostsMonitor::serve() {
  pthread_setname_np(pthread_self(), "pycollect hosts");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kInterval, [this] { return left_; })) {
    group_->abort_if_died();
    if (group_->is_healthy()) continue;
    lock.unlock();
    board_->publish(group_->abort_cause());
    return wire_->abort();
  }
}

// A connection may close because of a failure that another rank is about to publish: connections of
// a rank close before the rank itself knows that it has timed out.
bool HostsMonitor::await_cause() {
  const ipc::Deadline end = ipc::Clock::now() + kCauseTime;
  while (group_->is_healthy() && ipc::Clock::now() < end && !board_->find()) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, kCauseTime / 10, [this] { return left_; })) return false;
  }
  return group_->is_healthy();
}

void HostsMonitor::watch() {
  pthread_setname_np(pthread_self(), "pycollect watch");
  const Rank next = first_rank(1);
  try {
    const auto farewell = std::make_shared<std::byte>();
    wire_->await(wire_->post_receive(next, ProcessGroupWire::kFarewell, farewell.get(), 1,
                                     ipc::Deadline::max(), farewell),
                 ipc::Deadline::max());
  } catch (const ipc::WireFailure& failure) {
    if (!await_cause()) return;
    group_->abort(link_.cause_of(next, failure));
    board_->publish(group_->abort_cause());
    wire_->abort();
  }
}

}  // namespace pycollect::dist
