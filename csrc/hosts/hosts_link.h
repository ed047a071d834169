// What the ranks of a world of several hosts know of it: the hosts, their names, and the wire.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../group/group.h"
#include "../group/placement.h"
#include "wire.h"

namespace pycollect::ipc {

// How long a host's monitor, which finds a connection closed, waits for the cause; a call waits
// twice as long. A rank closes its connections because another one has died, and the monitor knows
// which one that was: it must abort the group before a call blames the rank that has closed.
inline constexpr std::chrono::milliseconds kCauseTime{500};

struct HostsLink {
  std::shared_ptr<const Hosts> hosts;
  std::vector<std::string> names;  // [host], for messages
  std::shared_ptr<Wire> wire;
  // Returns why ranks of another host have aborted the group, if they have told it.
  std::function<std::optional<AbortCause>()> find_cause;

  std::string describe(Rank rank) const {
    const int host = hosts->of(rank);
    return text("rank ", rank, " on host ", names[host], " (", name(hosts->ranks(host)), ")");
  }

  // Calls `f`, which waits for `peer`. If the wire fails in it, aborts the group and throws the
  // cause; the ranks of this host may have found another one first. A transfer that was complete
  // when the group was aborted does not fail.
  template <class F>
  void run(Group& group, const OpContext& context, Rank peer, const F& f) const {
    try {
      f();
    } catch (const WireFailure& failure) {
      group.require_healthy(context);
      if (failure.timed_out)
        group.fail(AbortRecord::timed_out,
                   text("Timed out while waiting; ", describe(peer), " did not arrive"), context);
      const AbortCause cause =
          cause_of(peer, failure, 2 * kCauseTime, [&] { return !group.is_healthy(); });
      group.fail(cause.kind, cause.text, context);
    }
  }

  // Returns why the connection to `peer` is closed. Waits for the cause, which another rank may be
  // about to tell: connections of a rank close before the rank itself knows that it has timed out,
  // and a store takes time. Returns early if `ends()`.
  AbortCause cause_of(Rank peer, const WireFailure& failure, Clock::duration at_most,
                      const std::function<bool()>& ends) const {
    for (const auto end = Clock::now() + at_most; !ends() && Clock::now() < end;) {
      if (const auto cause = find_cause()) return *cause;
      std::this_thread::sleep_for(kCauseTime / 20);
    }
    return {AbortRecord::lost,
            text("the connection to ", describe(peer),
                 " broke: the rank or its host has died or left, or the network has failed (",
                 failure.what(), ")")};
  }
};

}  // namespace pycollect::ipc
