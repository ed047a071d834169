// The channel between hosts: moves bytes between ranks on different hosts, names the hosts, and
// knows why a connection has ended. Implemented over a process group of torch
// (csrc/torch/c10d/hosts).
#pragma once
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../group/group.h"
#include "../group/placement.h"
#include "../group/segment.h"
#include "../group/wait.h"
#include "../plan/plan.h"

namespace pycollect::ipc {

struct ChannelFailure : std::runtime_error {
  ChannelFailure(const std::string& what, bool timed_out_)
      : std::runtime_error(what), timed_out(timed_out_) {}
  bool timed_out;
};

// How long a rank waits that finds a connection closed without a goodbye: other threads still take
// the messages that came before that, and a rank of the peer's host may tell the cause.
inline constexpr std::chrono::milliseconds kLossTime{500};

// A send or receive that has begun, and keeps the owner of its memory. The channel keeps it until
// it has been awaited or the connections are closed.
struct HostTransfer {
  HostTransfer(Rank peer_, MemoryOwner owner_) : peer(peer_), owner(std::move(owner_)) {}
  virtual ~HostTransfer() = default;
  HostTransfer(const HostTransfer&) = delete;
  HostTransfer& operator=(const HostTransfer&) = delete;
  const Rank peer;
  const MemoryOwner owner;
};
using HostTransferPtr = std::shared_ptr<HostTransfer>;

class HostChannel {
 public:
  // Numbers of messages below this one are for collectives.
  static constexpr int kFirstOfMessages = 1 << 30;

  // `names`: [host], for messages to users.
  HostChannel(Hosts hosts, std::vector<std::string> names)
      : hosts_(std::move(hosts)), names_(std::move(names)) {}
  virtual ~HostChannel() = default;
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  const Hosts& hosts() const { return hosts_; }
  std::string describe(Rank rank) const {
    const int host = hosts_.of(rank);
    return text("rank ", rank, " on host ", names_[host], " (", name(hosts_.ranks(host)), ")");
  }

  // Begin to send and to receive. The memory must stay valid as long as the transfer lives, which
  // `owner` may ensure. The n-th send with a number to a rank arrives at that rank's n-th receive
  // with the number from this one. `bytes` of a receive is a limit: the message may be shorter.
  // Throw ChannelFailure.
  virtual HostTransferPtr send(Rank to, int number, const std::byte* at, std::size_t bytes,
                               MemoryOwner owner) = 0;
  virtual HostTransferPtr receive(Rank from, int number, std::byte* at, std::size_t bytes,
                                  MemoryOwner owner) = 0;
  // Waits until the memory of a transfer may be used again; once for each. Throws ChannelFailure,
  // and what a signal handler raises.
  virtual void await(const HostTransferPtr& transfer, Deadline deadline) = 0;

  // Tells the peers why this rank closes its connections, or with the kind `healthy` that it
  // leaves; then closes them, unless it has done so: every wait for a transfer that is not complete
  // throws ChannelFailure, here and at the peers.
  virtual void close(const AbortCause& why) = 0;
  // Returns the goodbye of a peer, if it has come: the last message of a rank before it closes its
  // connections. It has the cause if the group is aborted, and otherwise the kind `healthy`.
  virtual std::optional<AbortCause> goodbye_of(Rank peer) const = 0;
  // Returns why the connection to `peer`, in which `failure` has been found, is closed: after a
  // while, if neither the peer nor a rank of this host has told it.
  AbortCause cause_of(const Group& group, Rank peer, const ChannelFailure& failure) const {
    const Deadline end = Clock::now() + kLossTime;
    for (;; std::this_thread::sleep_for(kLossTime / 50)) {
      if (!group.is_healthy()) return group.abort_cause();
      const std::optional<AbortCause> said = goodbye_of(peer);
      if (said && said->kind != AbortRecord::healthy) return *said;
      if (said) return {AbortRecord::lost, text(describe(peer), " has left the group")};
      if (Clock::now() >= end) break;
    }
    return {AbortRecord::lost, text("the connection to ", describe(peer),
                                    " broke: the rank or its host has died, or the network has ",
                                    "failed (", failure.what(), ")")};
  }
  [[noreturn]] void fail_late(Group& group, Rank peer, const OpContext& context) const {
    group.fail(AbortRecord::timed_out,
               text("Timed out while waiting; ", describe(peer), " did not arrive"), context);
  }

  // Calls `f`, which waits for `peer`. If the channel fails in it, aborts the group and throws the
  // cause; the ranks of this host may have found another one first. A transfer that was complete
  // when the group was aborted does not fail.
  template <class F>
  auto run(Group& group, const OpContext& context, Rank peer, const F& f) const {
    try {
      return f();
    } catch (const ChannelFailure& failure) {
      group.require_healthy(context);
      if (failure.timed_out) fail_late(group, peer, context);
      const AbortCause cause = cause_of(group, peer, failure);
      group.fail(cause.kind, cause.text, context);
    }
  }

 private:
  const Hosts hosts_;
  const std::vector<std::string> names_;
};

}  // namespace pycollect::ipc
