// See emulated_streams.h.
#include "emulated_streams.h"

#include <algorithm>
#include <numeric>

namespace pycollect::cuda {

// Mean number of steps before the streams change their turns.
constexpr int kTurn = 8;

void EmulatedStreams::stop() {
  {
    const Lock lock(mutex);
    closed_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::size_t EmulatedStreams::add(bool of_caller) {
  streams_.push_back({of_caller});
  return streams_.size() - 1;
}

void EmulatedStreams::set_order(WorkOrder order, std::uint64_t seed) {
  const Lock lock(mutex);
  order_ = order;
  random_.seed(seed);
  earliness_ = random_() % 4;
}

void EmulatedStreams::enqueue(std::size_t stream, Work work) {
  StreamQueue& s = streams_[stream];
  s.work.push_back(std::move(work));
  ++s.enqueued;
  if (order_ == WorkOrder::as_issued || (order_ == WorkOrder::eager && !s.of_caller))
    advance(end(stream));
  while (order_ == WorkOrder::random && random_() % 4 < earliness_ && step_any()) {
  }
  changed_.notify_all();
}

bool EmulatedStreams::is_idle() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const StreamQueue& s) { return s.work.empty(); });
}

bool EmulatedStreams::step(std::size_t stream) {
  StreamQueue& s = streams_[stream];
  if (s.work.empty() || stalled_ == stream || !s.work.front()()) return false;
  Work done = std::move(s.work.front());
  s.work.pop_front();
  ++s.done;
  if (thread_.joinable()) {
    finished_.push_back(std::move(done));
    changed_.notify_all();
  }
  return true;
}

bool EmulatedStreams::step_any() {
  if (turns_.size() != streams_.size() || random_() % kTurn == 0)
    turns_ = any_order(streams_.size());
  for (const std::size_t s : turns_)
    if (step(s)) return true;
  return false;
}

bool EmulatedStreams::advance(Point to) {
  while (!passed(to))
    if (!(order_ == WorkOrder::random ? step_any() : step(to.stream))) return false;
  return true;
}

bool EmulatedStreams::reach(Point to) {
  return passed(to) || (order_ != WorkOrder::random && advance(to));
}

std::vector<std::size_t> EmulatedStreams::any_order(std::size_t count) {
  std::vector<std::size_t> all(count);
  std::iota(all.begin(), all.end(), 0);
  if (order_ == WorkOrder::random) std::shuffle(all.begin(), all.end(), random_);
  return all;
}

void EmulatedStreams::start_thread() {
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
}

// Visits the streams in rounds, each in a random order, and skips each with a probability of 1/8.
void EmulatedStreams::serve() {
  Lock lock(mutex);
  while (!closed_) {
    if (is_idle() && finished_.empty()) {
      changed_.wait(lock);
      continue;
    }
    std::vector<std::size_t> turns(streams_.size());
    std::iota(turns.begin(), turns.end(), 0);
    std::shuffle(turns.begin(), turns.end(), random_);
    for (const std::size_t s : turns) {
      if (random_() % 8 == 0) continue;
      while (step(s) && order_ == WorkOrder::eager) {
      }
    }
    std::vector<Work> finished;
    finished.swap(finished_);
    lock.unlock();
    finished.clear();
    lock.lock();
    changed_.wait_for(lock, pause_, [&] { return closed_; });
  }
}

void EmulatedStreams::pause_for(double seconds) {
  const Lock lock(mutex);
  pause_ = std::chrono::microseconds(static_cast<std::int64_t>(seconds * 1e6));
}

void EmulatedStreams::drain(std::size_t stream) {
  Lock lock(mutex);
  const Point to = end(stream);
  lock.unlock();
  drain(to);
}

void EmulatedStreams::drain(Point to) {
  Lock lock(mutex);
  while (!advance(to) && thread_.joinable() && stalled_ != to.stream) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
  }
}

bool EmulatedStreams::drain_all(std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  Lock lock(mutex);
  for (std::size_t s = 0; s < streams_.size(); ++s) {
    const Point to = end(s);
    while (!advance(to)) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
    }
  }
  return true;
}

}  // namespace pycollect::cuda
