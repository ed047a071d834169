// The wire over a process group of torch that has all ranks of the world. Thread-safe.
//
// Gloo connects two ranks when both have begun to use the connection, and blocks the one that
// begins first. So a thread connects this rank to others, one after the other; no other thread uses
// a connection before it is there.
#pragma once
#include <atomic>
#include <deque>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../../../rank_executor/wire.h"

namespace pycollect::dist {

class ProcessGroupWire final : public ipc::Wire {
 public:
  // Number of a message that says that its sender leaves.
  static constexpr int kFarewell = std::numeric_limits<int>::max() - 2;

  // `peers`: in an order such that all ranks connect to each other.
  ProcessGroupWire(c10::intrusive_ptr<c10d::Backend> group, std::vector<Rank> peers);
  ~ProcessGroupWire() override { abort(); }

  void send(Rank to, int number, const std::byte* at, std::size_t bytes, ipc::Deadline deadline,
            Owner owner = {}) override;
  void receive(Rank from, int number, std::byte* at, std::size_t bytes, ipc::Deadline deadline,
               Owner owner = {}) override;
  void await_receive(Rank from, int number, ipc::Deadline deadline) override;
  void await_sends(ipc::Deadline deadline) override;
  std::optional<Rank> oldest_send() const override;

  // A transfer that is awaited by itself.
  class Pending;
  using PendingPtr = std::shared_ptr<Pending>;
  PendingPtr post_send(Rank to, int number, const std::byte* at, std::size_t bytes,
                       ipc::Deadline deadline, Owner owner);
  PendingPtr post_receive(Rank from, int number, std::byte* at, std::size_t bytes,
                          ipc::Deadline deadline, Owner owner);
  // Waits until this rank is connected to `peer`. Otherwise, the first transfer does.
  void await_connected(Rank peer, ipc::Deadline deadline);
  void await(const PendingPtr& pending, ipc::Deadline deadline);

  // Closes all connections: every wait throws, here and at the peers.
  void abort();

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct Connections;
  struct WireBuffer {
    std::byte* at;
    std::size_t bytes;
    Owner owner;
  };
  PendingPtr post(Rank peer, int number, WireBuffer memory, bool receives, ipc::Deadline deadline);

  void close_all(c10d::Backend& group) const;

  const std::shared_ptr<Connections> connections_;
  mutable std::mutex mutex_;
  std::list<PendingPtr> pending_;  // everything that has not been awaited
  std::deque<PendingPtr> sends_;
  std::map<std::pair<Rank, int>, std::deque<PendingPtr>> receives_;
};

class ProcessGroupWire::Pending {
 public:
  Pending(Rank peer_, WorkPtr work_, Owner owner)
      : peer(peer_), owner_(std::move(owner)), work(std::move(work_)) {}
  const Rank peer;

 private:
  const Owner owner_;  // outlives the work, which has addresses in its memory

 public:
  const WorkPtr work;
};

}  // namespace pycollect::dist
