// The wire over a Gloo process group of torch that has all ranks of the world. Thread-safe.
//
// Gloo connects two ranks when both have begun to use the connection, and blocks the one that
// begins first. So a thread connects this rank to others, one after the other; no other thread uses
// a connection before it is there.
#pragma once
#include <atomic>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../../../hosts/hosts_link.h"

namespace pycollect::dist {

using TorchBackendPtr = c10::intrusive_ptr<c10d::Backend>;

class ProcessGroupWire final : public ipc::Wire {
 public:
  // Number of a message that says that its sender leaves.
  static constexpr int kFarewell = std::numeric_limits<int>::max() - 2;

  // `peers`: in an order such that all ranks connect to each other.
  ProcessGroupWire(TorchBackendPtr gloo, std::vector<Rank> peers);
  // Waits a short time for ranks that still connect to this one.
  ~ProcessGroupWire() override;

  void send(Rank to, int number, const std::byte* at, std::size_t bytes, ipc::Deadline deadline,
            ipc::MemoryOwner owner = {}) override;
  void receive(Rank from, int number, std::byte* at, std::size_t bytes, ipc::Deadline deadline,
               ipc::MemoryOwner owner = {}) override;
  void await_receive(Rank from, int number, ipc::Deadline deadline) override;
  void await_sends(ipc::Deadline deadline, std::size_t most_left = 0) override;
  std::optional<Rank> oldest_send() const override;

  // A transfer that is awaited by itself.
  class Pending;
  using PendingPtr = std::shared_ptr<Pending>;
  PendingPtr post_send(Rank to, int number, const std::byte* at, std::size_t bytes,
                       ipc::Deadline deadline, ipc::MemoryOwner owner);
  PendingPtr post_receive(Rank from, int number, std::byte* at, std::size_t bytes,
                          ipc::Deadline deadline, ipc::MemoryOwner owner);
  bool is_connected(Rank peer) const;
  // Waits until this rank is connected to `peer`. Otherwise, the first transfer does.
  void await_connected(Rank peer, ipc::Deadline deadline);
  // Throws what a signal handler raises, and then closes all connections.
  void await(const PendingPtr& pending, ipc::Deadline deadline);
  // Gives up a transfer that nobody awaits; its memory is free when its last pointer is gone.
  void drop(const PendingPtr& pending);
  // Lets the thread that handles signals look for them, if it waits for a transfer.
  void look_for_signals();

  // Closes all connections: every wait for a transfer that is not complete throws, here and at the
  // peers, there perhaps later, when all connections have been made.
  void abort();

 private:
  // Numbers of messages of the wire itself.
  static constexpr int kConnect = kFarewell + 1, kNever = kConnect + 1;

  struct Connections;
  class WaitLimit;
  enum class TransferEnd { send, receive };
  struct WireBuffer {
    std::byte* at;
    std::size_t bytes;
    ipc::MemoryOwner owner = {};
  };
  PendingPtr post(TransferEnd end, Rank peer, int number, WireBuffer memory,
                  ipc::Deadline deadline);

  bool is_closed() const;
  static bool await_once(const PendingPtr& pending, ipc::Deadline deadline);
  bool was_complete(const PendingPtr& pending);

  const std::shared_ptr<Connections> connections_;
  mutable std::mutex mutex_;
  std::set<PendingPtr> pending_;  // everything that has not been awaited
  PendingPtr awaited_;            // by the thread that handles signals
  std::deque<PendingPtr> sends_;
  std::map<std::pair<Rank, int>, std::deque<PendingPtr>> receives_;
};

class ProcessGroupWire::Pending {
 public:
  Pending(Rank peer_, c10::intrusive_ptr<c10d::Work> work_, ipc::MemoryOwner owner)
      : peer(peer_), owner_(std::move(owner)), work(std::move(work_)) {}
  void interrupt() const { work->abort(); }  // a wait of another thread returns false
  const Rank peer;

 private:
  const ipc::MemoryOwner owner_;  // outlives the transfer, which has addresses in its memory

 public:
  const c10::intrusive_ptr<c10d::Work> work;
};

}  // namespace pycollect::dist
