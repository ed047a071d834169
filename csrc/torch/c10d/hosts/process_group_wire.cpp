// See process_group_wire.h.
#include "process_group_wire.h"

#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <string_view>
#include <thread>

#include "../../../group/system.h"
#include "../../../plan/error.h"
#include "../interpreter.h"

namespace pycollect::dist {
namespace {

std::string first_line(std::string_view text) {
  // Drops "[file:line] " and the advice that Gloo adds to every message.
  if (text.starts_with("[")) text.remove_prefix(std::min(text.size(), text.find("] ") + 2));
  return std::string(text.substr(0, std::min(text.find(". This is"), text.find('\n'))));
}

// How long a wire that ends waits until all connections are made: a process that ended would leave
// the other ranks waiting. If a rank has died meanwhile, they never are.
constexpr std::chrono::seconds kConnectTime{2};

// How much later than a `WaitLimit` a wait runs out of time.
constexpr std::chrono::seconds kGrace{1};

// Limits of the timeout that is passed to a work: zero stands for the group's, and Gloo adds it to
// a clock of nanoseconds.
constexpr std::chrono::milliseconds kLeastTimeout{1}, kMostTimeout = std::chrono::hours(24 * 365);

}  // namespace

// The connections of this rank, and the thread that makes them, which may outlive the wire. It goes
// on after the wire has been closed, because the other ranks wait for this one.
struct ProcessGroupWire::Connections {
  std::mutex mutex;
  std::condition_variable changed;
  TorchBackendPtr gloo;                // null after its connections have been closed
  bool is_closed = false;              // for the wire, perhaps before Gloo's connections
  bool is_made = false;                // every connection is there or has failed; `peers` is final
  bool has_ended = false;              // the thread
  std::set<Rank> peers;                // to which this rank is connected
  std::map<Rank, std::string> failed;  // to which it cannot be, and why

  // Returns the process group once this rank is connected to `peer`.
  TorchBackendPtr with(Rank peer, ipc::Deadline deadline) {
    std::unique_lock lock(mutex);
    const auto is_known = [&] {
      return is_closed || peers.contains(peer) || failed.contains(peer);
    };
    bool known = is_known();
    while (!known && ipc::Clock::now() < deadline) {
      const auto soon = ipc::Clock::now() + ipc::kSignalInterval;
      known = changed.wait_until(lock, std::min(deadline, soon), is_known);
      if (known || !handles_signals()) continue;
      lock.unlock();
      check_signals();
      lock.lock();
    }
    if (!known) throw ipc::WireFailure("not connected in time", true);
    if (is_closed) throw ipc::WireFailure("the connections are closed", false);
    if (const auto why = failed.find(peer); why != failed.end())
      throw ipc::WireFailure(text("it did not connect: ", why->second), false);
    return gloo;
  }

  // Closes all connections, or lets the thread that makes them do so: Gloo ends the process when a
  // connection comes about after it has been closed.
  void close() {
    TorchBackendPtr open;
    {
      const std::lock_guard lock(mutex);
      is_closed = true;
      changed.notify_all();
      if (is_made) open.swap(gloo);
    }
    if (open) close_all(*open);
  }

  bool are_made() {
    const std::lock_guard lock(mutex);
    return is_made;
  }

  // Waits for the thread, but not long.
  void end() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, kConnectTime, [this] { return has_ended; });
  }

  void connect(const std::vector<Rank>& all) {
    TorchBackendPtr open = gloo;
    for (const Rank peer : all) {
      const std::optional<std::string> failure = try_to_connect(*open, peer);
      const std::lock_guard lock(mutex);
      if (failure)
        failed.emplace(peer, *failure);
      else
        peers.insert(peer);
      changed.notify_all();
    }
    std::unique_lock lock(mutex);
    is_made = true;
    const bool closes = is_closed;
    if (closes) gloo.reset();
    lock.unlock();
    if (closes) close_all(*open);
    open.reset();
    lock.lock();
    has_ended = true;
    changed.notify_all();
  }

  // Transfers have no events in profiles: one may be awaited after the profile in which it began
  // has ended, and would write into freed memory.
  static c10::intrusive_ptr<c10d::Work> begin(c10d::Backend& gloo, TransferEnd end, Rank peer,
                                              int number, const WireBuffer& memory) {
    const at::DisableRecordFunctionGuard no_event;
    std::vector<at::Tensor> tensors{at::from_blob(memory.at, {static_cast<int64_t>(memory.bytes)},
                                                  at::TensorOptions(at::kByte))};
    return end == TransferEnd::send ? gloo.send(tensors, peer, number)
                                    : gloo.recv(tensors, peer, number);
  }

 private:
  // One byte from one to the other makes both of them use the connection. Blocks until both do.
  static std::optional<std::string> try_to_connect(c10d::Backend& gloo, Rank peer) {
    const auto end = gloo.getRank() < peer ? TransferEnd::send : TransferEnd::receive;
    std::byte scratch{};
    try {
      begin(gloo, end, peer, kConnect, {&scratch, 1})->wait(kMostTimeout);
      return std::nullopt;
    } catch (const std::exception& error) {
      return first_line(error.what());
    }
  }

  // A wait of Gloo that runs out of time closes all connections, and no other call ends a wait of
  // another thread. A receive of a message that never comes runs out of time.
  void close_all(c10d::Backend& open) const {
    std::byte scratch{};
    for (const Rank peer : peers) {
      c10::intrusive_ptr<c10d::Work> work;
      try {
        work = begin(open, TransferEnd::receive, peer, kNever, {&scratch, 1});
      } catch (const std::exception&) {
        continue;  // this connection is closed already
      }
      try {
        work->wait(kLeastTimeout);
      } catch (const std::exception& error) {
        if (std::string_view(error.what()).find("Timed out") != std::string_view::npos) return;
      }
    }
  }
};

// Interrupts a wait at its deadline, unless it ends before.
class ProcessGroupWire::WaitLimit {
 public:
  WaitLimit(const Pending& pending, ipc::Deadline deadline)
      : thread_(ipc::new_thread([this, &pending, deadline] {
          std::unique_lock lock(mutex_);
          if (!changed_.wait_until(lock, deadline, [this] { return ended_; })) pending.interrupt();
        })) {}
  ~WaitLimit() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;
};

ProcessGroupWire::ProcessGroupWire(TorchBackendPtr gloo, std::vector<Rank> peers)
    : connections_(std::make_shared<Connections>()) {
  connections_->gloo = std::move(gloo);
  ipc::new_thread([all = connections_, peers = std::move(peers)] { all->connect(peers); }).detach();
}

ProcessGroupWire::~ProcessGroupWire() {
  const GilRelease no_gil;
  abort();
  connections_->end();
}

bool ProcessGroupWire::is_connected(Rank peer) const {
  const std::lock_guard lock(connections_->mutex);
  return connections_->peers.contains(peer);
}

void ProcessGroupWire::await_connected(Rank peer, ipc::Deadline deadline) {
  connections_->with(peer, deadline);
}

void ProcessGroupWire::drop(const PendingPtr& pending) {
  const std::lock_guard lock(mutex_);
  pending_.erase(pending);
}

ProcessGroupWire::PendingPtr ProcessGroupWire::post(TransferEnd end, Rank peer, int number,
                                                    WireBuffer memory, ipc::Deadline deadline) {
  const auto gloo = connections_->with(peer, deadline);
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = Connections::begin(*gloo, end, peer, number, memory);
  } catch (const std::exception& error) {
    throw ipc::WireFailure(first_line(error.what()), ipc::Clock::now() >= deadline);
  }
  auto pending = std::make_shared<Pending>(peer, std::move(work), std::move(memory.owner));
  const std::lock_guard lock(mutex_);
  if (is_closed()) throw ipc::WireFailure("the connections are closed", false);
  pending_.insert(pending);
  return pending;
}

ProcessGroupWire::PendingPtr ProcessGroupWire::post_send(Rank to, int number, const std::byte* at,
                                                         std::size_t bytes, ipc::Deadline deadline,
                                                         ipc::MemoryOwner owner) {
  return post(TransferEnd::send, to, number, {const_cast<std::byte*>(at), bytes, std::move(owner)},
              deadline);
}
ProcessGroupWire::PendingPtr ProcessGroupWire::post_receive(Rank from, int number, std::byte* at,
                                                            std::size_t bytes,
                                                            ipc::Deadline deadline,
                                                            ipc::MemoryOwner owner) {
  return post(TransferEnd::receive, from, number, {at, bytes, std::move(owner)}, deadline);
}

// Returns false if it was interrupted.
bool ProcessGroupWire::await_once(const PendingPtr& pending, ipc::Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - ipc::Clock::now());
  try {
    return pending->work->wait(std::clamp(left, kLeastTimeout, kMostTimeout));
  } catch (const std::exception& error) {
    throw ipc::WireFailure(first_line(error.what()), ipc::Clock::now() >= deadline);
  }
}

// Returns whether a transfer that abort() has interrupted was complete. Gloo tells of the
// interruption first. It tells of the completion, or that time runs out, in the next wait, which
// must not close connections that are still being made.
bool ProcessGroupWire::was_complete(const PendingPtr& pending) {
  if (!connections_->are_made()) return false;
  try {
    return await_once(pending, ipc::Clock::now());
  } catch (const ipc::WireFailure&) {
    return false;
  }
}

// After a signal, connections are closed at once: transfers use memory of the interrupted call.
void ProcessGroupWire::await(const PendingPtr& pending, ipc::Deadline deadline) {
  const bool looks = handles_signals();
  const auto awaits = [&](PendingPtr now) {
    const std::lock_guard lock(mutex_);
    if (looks) awaited_.swap(now);
  };
  awaits(pending);
  try {
    // A wait of Gloo that runs out of time closes all connections, also those still being made.
    std::optional<WaitLimit> limit;
    if (deadline != ipc::Deadline::max() && !connections_->are_made())
      limit.emplace(*pending, deadline);
    while (!await_once(pending, limit ? deadline + kGrace : deadline)) {
      if (is_closed()) {
        if (was_complete(pending)) break;
        throw ipc::WireFailure("the connections are closed", false);
      }
      if (limit && ipc::Clock::now() >= deadline) throw ipc::WireFailure("Timed out", true);
      if (looks) check_signals();
    }
  } catch (const ipc::WireFailure&) {
    awaits(nullptr);
    throw;
  } catch (...) {
    awaits(nullptr);
    abort();
    throw;
  }
  const std::lock_guard lock(mutex_);
  if (looks) awaited_.reset();
  pending_.erase(pending);
}

void ProcessGroupWire::look_for_signals() {
  PendingPtr awaited;
  {
    const std::lock_guard lock(mutex_);
    awaited = awaited_;
  }
  if (awaited) awaited->interrupt();
}

void ProcessGroupWire::send(Rank to, int number, const std::byte* at, std::size_t bytes,
                            ipc::Deadline deadline, ipc::MemoryOwner owner) {
  auto pending = post_send(to, number, at, bytes, deadline, std::move(owner));
  const std::lock_guard lock(mutex_);
  sends_.push_back(std::move(pending));
}

void ProcessGroupWire::receive(Rank from, int number, std::byte* at, std::size_t bytes,
                               ipc::Deadline deadline, ipc::MemoryOwner owner) {
  auto pending = post_receive(from, number, at, bytes, deadline, std::move(owner));
  const std::lock_guard lock(mutex_);
  receives_[{from, number}].push_back(std::move(pending));
}

void ProcessGroupWire::await_receive(Rank from, int number, ipc::Deadline deadline) {
  PendingPtr oldest;
  {
    const std::lock_guard lock(mutex_);
    const auto posted = receives_.find({from, number});
    if (posted == receives_.end()) throw ipc::WireFailure("the connections are closed", false);
    oldest = std::move(posted->second.front());
    posted->second.pop_front();
    if (posted->second.empty()) receives_.erase(posted);
  }
  await(oldest, deadline);
}

std::optional<Rank> ProcessGroupWire::oldest_send() const {
  const std::lock_guard lock(mutex_);
  return sends_.empty() ? std::nullopt : std::optional(sends_.front()->peer);
}

void ProcessGroupWire::await_sends(ipc::Deadline deadline, std::size_t most_left) {
  for (;;) {
    PendingPtr oldest;
    {
      const std::lock_guard lock(mutex_);
      if (sends_.size() <= most_left) return;
      oldest = std::move(sends_.front());
      sends_.pop_front();  // a wait for a send that has failed would last until its deadline
    }
    await(oldest, deadline);
  }
}

bool ProcessGroupWire::is_closed() const {
  const std::lock_guard lock(connections_->mutex);
  return connections_->is_closed;
}

void ProcessGroupWire::abort() {
  connections_->close();
  std::set<PendingPtr> pending;
  const std::lock_guard lock(mutex_);
  pending.swap(pending_);
  // Gloo ends no wait of a connection that has broken before, or that is not closed yet.
  for (const PendingPtr& p : pending) p->interrupt();
}

}  // namespace pycollect::dist
