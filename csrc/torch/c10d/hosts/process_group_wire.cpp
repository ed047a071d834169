// See process_group_wire.h. Of a Gloo process group, a wait that runs out of time closes all
// connections; `abort` makes use of it, because no other call ends a wait of another thread.
#include "process_group_wire.h"

#include <ATen/ops/from_blob.h>

#include <condition_variable>
#include <limits>
#include <set>
#include <thread>

#include "../../../group/new_thread.h"
#include "../../../plan/error.h"

namespace pycollect::dist {
namespace {

// Limits of the timeout that is passed to a work: zero stands for the group's, and Gloo adds it to
// a clock of nanoseconds.
constexpr std::chrono::milliseconds kLeastTimeout{1}, kMostTimeout = std::chrono::hours(24 * 365);

std::string first_line(std::string_view text) {
  // Drops "[file:line] " and the advice that Gloo adds to every message.
  if (text.starts_with("[")) text.remove_prefix(std::min(text.size(), text.find("] ") + 2));
  return std::string(text.substr(0, text.find(". This is")));
}

// Numbers that no other message has.
constexpr int kConnect = ProcessGroupWire::kFarewell + 1, kNever = kConnect + 1;

at::Tensor tensor_of(std::byte* at, std::size_t bytes) {
  return at::from_blob(at, {static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte));
}

}  // namespace

// The connections of this rank, and the thread that makes them, which may outlive the wire.
struct ProcessGroupWire::Connections {
  std::mutex mutex;
  std::condition_variable changed;
  c10::intrusive_ptr<c10d::Backend> group;  // null after close()
  std::set<Rank> peers, failed;             // ranks to which this one is connected, and cannot be

  // Returns the process group once this rank is connected to `peer`.
  c10::intrusive_ptr<c10d::Backend> with(Rank peer, ipc::Deadline deadline) {
    std::unique_lock lock(mutex);
    const bool known = changed.wait_until(
        lock, deadline, [&] { return !group || peers.contains(peer) || failed.contains(peer); });
    if (!known) throw ipc::WireFailure("not connected in time", true);
    if (!group) throw ipc::WireFailure("the connections are closed", false);
    if (failed.contains(peer)) throw ipc::WireFailure("it did not connect", false);
    return group;
  }

  bool is_closed() {
    const std::lock_guard lock(mutex);
    return !group;
  }

  c10::intrusive_ptr<c10d::Backend> close() {
    const std::lock_guard lock(mutex);
    changed.notify_all();
    return std::move(group);
  }

  void connect(const std::vector<Rank>& all) {
    for (const Rank peer : all) {
      std::unique_lock lock(mutex);
      const auto made = group;
      lock.unlock();
      if (!made) return;
      const bool connected = connects(*made, peer);
      lock.lock();
      (connected ? peers : failed).insert(peer);
      changed.notify_all();
    }
  }

 private:
  // One byte from one to the other makes both of them use the connection.
  bool connects(c10d::Backend& group, Rank peer) {
    std::vector<at::Tensor> byte{tensor_of(&scratch, 1)};
    try {
      const auto work = group.getRank() < peer ? group.send(byte, peer, kConnect)
                                               : group.recv(byte, peer, kConnect);
      return work->wait(kMostTimeout);
    } catch (const std::exception&) {
      return false;
    }
  }

  std::byte scratch{};
};

ProcessGroupWire::ProcessGroupWire(c10::intrusive_ptr<c10d::Backend> group, std::vector<Rank> peers)
    : connections_(std::make_shared<Connections>()) {
  connections_->group = std::move(group);
  ipc::new_thread([all = connections_, peers = std::move(peers)] { all->connect(peers); }).detach();
}

void ProcessGroupWire::await_connected(Rank peer, ipc::Deadline deadline) {
  connections_->with(peer, deadline);
}

ProcessGroupWire::PendingPtr ProcessGroupWire::post(Rank peer, int number, WireBuffer memory,
                                                    bool receives, ipc::Deadline deadline) {
  const auto group = connections_->with(peer, deadline);
  std::vector<at::Tensor> tensors{tensor_of(memory.at, memory.bytes)};
  WorkPtr work;
  try {
    work = receives ? group->recv(tensors, peer, number) : group->send(tensors, peer, number);
  } catch (const std::exception& error) {
    throw ipc::WireFailure(first_line(error.what()), false);
  }
  auto pending = std::make_shared<Pending>(peer, std::move(work), std::move(memory.owner));
  {
    const std::lock_guard lock(mutex_);
    pending_.push_back(pending);
  }
  if (connections_->is_closed()) {  // perhaps abort() has not seen the transfer
    close_all(*group);
    throw ipc::WireFailure("the connections are closed", false);
  }
  return pending;
}

ProcessGroupWire::PendingPtr ProcessGroupWire::post_send(Rank to, int number, const std::byte* at,
                                                         std::size_t bytes, ipc::Deadline deadline,
                                                         Owner owner) {
  return post(to, number, {const_cast<std::byte*>(at), bytes, std::move(owner)}, false, deadline);
}
ProcessGroupWire::PendingPtr ProcessGroupWire::post_receive(Rank from, int number, std::byte* at,
                                                            std::size_t bytes,
                                                            ipc::Deadline deadline, Owner owner) {
  return post(from, number, {at, bytes, std::move(owner)}, true, deadline);
}

void ProcessGroupWire::await(const PendingPtr& pending, ipc::Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - ipc::Clock::now());
  try {
    pending->work->wait(std::clamp(left, kLeastTimeout, kMostTimeout));
  } catch (const std::exception& error) {
    throw ipc::WireFailure(first_line(error.what()), ipc::Clock::now() >= deadline);
  }
  const std::lock_guard lock(mutex_);
  pending_.remove(pending);
}

void ProcessGroupWire::send(Rank to, int number, const std::byte* at, std::size_t bytes,
                            ipc::Deadline deadline, Owner owner) {
  auto pending = post_send(to, number, at, bytes, deadline, std::move(owner));
  const std::lock_guard lock(mutex_);
  sends_.push_back(std::move(pending));
}

void ProcessGroupWire::receive(Rank from, int number, std::byte* at, std::size_t bytes,
                               ipc::Deadline deadline, Owner owner) {
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

void ProcessGroupWire::await_sends(ipc::Deadline deadline) {
  for (;;) {
    PendingPtr oldest;
    {
      const std::lock_guard lock(mutex_);
      if (sends_.empty()) return;
      oldest = sends_.front();
    }
    await(oldest, deadline);
    const std::lock_guard lock(mutex_);
    if (!sends_.empty()) sends_.pop_front();
  }
}

// A receive of a message that never comes runs out of time.
void ProcessGroupWire::close_all(c10d::Backend& group) const {
  std::set<Rank> peers;
  {
    const std::lock_guard lock(connections_->mutex);
    peers = connections_->peers;
  }
  auto byte = std::make_shared<std::byte>();
  for (const Rank peer : peers) {
    std::vector<at::Tensor> tensors{tensor_of(byte.get(), 1)};
    WorkPtr work;
    try {
      work = group.recv(tensors, peer, kNever);
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

void ProcessGroupWire::abort() {
  const auto group = connections_->close();
  if (group) close_all(*group);
  std::list<PendingPtr> pending;
  const std::lock_guard lock(mutex_);
  pending.swap(pending_);
  sends_.clear();
  receives_.clear();
}

}  // namespace pycollect::dist
