// The end of a group over several hosts: ranks of all hosts notice it, and learn the cause.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "../../../group/group.h"
#include "gloo_channel.h"

namespace pycollect::dist {

// Monitor of a group over several hosts: when a rank of this host has died, or has aborted the
// group, it tells other hosts the cause and closes the connections to them, so that their ranks
// throw, too. The first rank of every host also watches that of the next one, so the end of a host
// is noticed although nobody waits for it.
class HostsMonitor {
 public:
  // `tick` is called several times a second while the group is healthy.
  HostsMonitor(std::shared_ptr<ipc::Group> group, std::shared_ptr<GlooChannel> channel,
               std::function<void()> tick);
  ~HostsMonitor();  // closes the channel's connections
  HostsMonitor(const HostsMonitor&) = delete;
  HostsMonitor& operator=(const HostsMonitor&) = delete;

 private:
  void stop();
  void serve();
  void end();
  void watch();

  const std::shared_ptr<ipc::Group> group_;
  const std::shared_ptr<GlooChannel> channel_;
  const std::function<void()> tick_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool left_ = false;
  std::thread monitor_thread_, watching_thread_;
};

}  // namespace pycollect::dist
