// Monitor of a group over several hosts: when a rank of this host has died, or has aborted the
// group, it publishes the cause and closes the connections to other hosts, whose ranks then throw,
// too.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "../../../group/group.h"
#include "cause_board.h"
#include "process_group_wire.h"

namespace pycollect::dist {

class HostsMonitor {
 public:
  HostsMonitor(std::shared_ptr<ipc::Group> group, std::shared_ptr<ProcessGroupWire> wire,
               std::shared_ptr<const CauseBoard> board);
  ~HostsMonitor();
  HostsMonitor(const HostsMonitor&) = delete;
  HostsMonitor& operator=(const HostsMonitor&) = delete;

 private:
  void serve();

  const std::shared_ptr<ipc::Group> group_;
  const std::shared_ptr<ProcessGroupWire> wire_;
  const std::shared_ptr<const CauseBoard> board_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace pycollect::dist
