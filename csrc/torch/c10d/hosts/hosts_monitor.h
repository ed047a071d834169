// The end of a group over several hosts: ranks of all hosts notice it, and learn the cause.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../../group/failures.h"
#include "../../../group/group.h"
#include "../../../hosts/hosts_link.h"
#include "process_group_wire.h"

namespace pycollect::dist {

// Abort store: where the ranks of several hosts publish why a group is aborted, in the store with
// which it was made. Connections close at an abort, so a rank of another host knows only that one
// closed, and looks here for the reason. The store may be gone with its host: no call blocks long,
// and none accesses a store whose server does not answer, because torch logs that.
class AbortStore {
 public:
  explicit AbortStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  // Publishes the cause, unless another rank has published one.
  void publish(const ipc::AbortCause& cause) const;
  std::optional<ipc::AbortCause> find() const;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

// Monitor of a group over several hosts: when a rank of this host has died, or has aborted the
// group, it tells other hosts the cause and closes the connections to them, so that their ranks
// throw, too. The first rank of every host also watches that of the next one, which sends it the
// cause or a farewell. So the end of a host is noticed although nobody waits for it, and although
// the store may have ended with its host.
class HostsMonitor {
 public:
  // `tick` is called several times a second while the group is healthy.
  HostsMonitor(std::shared_ptr<ipc::Group> group, std::shared_ptr<ProcessGroupWire> wire,
               std::shared_ptr<const AbortStore> abort_store, ipc::HostsLink link,
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
  const std::shared_ptr<const AbortStore> abort_store_;
  const ipc::HostsLink link_;
  const std::function<void()> tick_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool left_ = false, told_ = false;
  std::thread monitor_thread_, watching_thread_;
};

}  // namespace pycollect::dist
