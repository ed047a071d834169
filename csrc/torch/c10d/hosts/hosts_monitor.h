// Monitor of a group over several hosts: when a rank of this host has died, or has aborted the
// group, it tells other hosts the cause and closes the connections to them, so that their ranks
// throw, too. The first rank of every host also watches that of the next one, which sends it the
// cause or a farewell. So the end of a host is noticed although nobody waits for it, and although
// the store may have ended with its host.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "../../../group/group.h"
#include "../../../hosts/hosts_link.h"
#include "cause_board.h"
#include "process_group_wire.h"

namespace pycollect::dist {

class HostsMonitor {
 public:
  // `tick` is called several times a second while the group is healthy.
  HostsMonitor(std::shared_ptr<ipc::Group> group, std::shared_ptr<ProcessGroupWire> wire,
               std::shared_ptr<const CauseBoard> board, ipc::HostsLink link,
               std::function<void()> tick);
  ~HostsMonitor();  // closes the wire's connections
  HostsMonitor(const HostsMonitor&) = delete;
  HostsMonitor& operator=(const HostsMonitor&) = delete;

  // Tells the host that watches this one that the group's end is no failure, unless it is one.
  void say_farewell();

 private:
  void stop();
  void serve();
  void tell(const ipc::AbortCause& cause);
  void end();
  void watch();
  // Returns the first rank of the host that is so many hosts after this one.
  Rank first_rank(int hosts_after) const;

  const std::shared_ptr<ipc::Group> group_;
  const std::shared_ptr<ProcessGroupWire> wire_;
  const std::shared_ptr<const CauseBoard> board_;
  const ipc::HostsLink link_;
  const std::function<void()> tick_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool left_ = false, told_ = false;
  std::thread monitor_thread_, watching_thread_;
};

}  // namespace pycollect::dist
