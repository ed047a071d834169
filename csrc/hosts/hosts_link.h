// How the ranks of several hosts are linked: the wire moves bytes between ranks on different hosts,
// and HostsLink names the hosts and finds out why a connection has failed.
#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../group/group.h"
#include "../group/placement.h"
#include "../group/segment.h"
#include "../group/wait.h"
#include "../plan/plan.h"

namespace pycollect::ipc {

struct WireFailure : std::runtime_error {
  WireFailure(const std::string& what, bool timed_out_)
      : std::runtime_error(what), timed_out(timed_out_) {}
  bool timed_out;
};

// Moves bytes between ranks on different hosts. Every call of one rank is made by one thread at a
// time. Implemented over a process group of torch (csrc/torch/c10d/hosts). All methods throw
// WireFailure.
class Wire {
 public:
  // Numbers below this one are for collectives, the others for messages.
  static constexpr int kFirstOfMessages = 1 << 30;

  virtual ~Wire() = default;
  // Begin to send and to receive. The memory must stay valid until the transfer is awaited, or as
  // long as `owner` keeps it: after a failure the wire keeps owners until it is destroyed. The n-th
  // send with a number to a rank arrives at that rank's n-th receive with the number from this one.
  // `bytes` of a receive is a limit: the message may be shorter.
  virtual void send(Rank to, int number, const std::byte* at, std::size_t bytes, Deadline deadline,
                    MemoryOwner owner = {}) = 0;
  virtual void receive(Rank from, int number, std::byte* at, std::size_t bytes, Deadline deadline,
                       MemoryOwner owner = {}) = 0;
  // Waits for the oldest receive from the rank with this number.
  virtual void await_receive(Rank from, int number, Deadline deadline) = 0;
  // Waits until the memory of all but the last `most_left` sends may be changed.
  virtual void await_sends(Deadline deadline, std::size_t most_left = 0) = 0;
  virtual std::optional<Rank> oldest_send() const = 0;  // its peer; none: all have ended
};

// How long a host's monitor, which finds a connection closed, waits for the cause; a call waits
// twice as long. A rank closes its connections because another one has died, and the monitor knows
// which one that was: it must abort the group before a call blames the rank that has closed.
inline constexpr std::chrono::milliseconds kCauseTime{500};

// What the ranks of a world of several hosts know of it: the hosts, their names, and the wire.
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
