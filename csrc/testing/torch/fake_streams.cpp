// See fake_streams.h.
#include "fake_streams.h"

#include <chrono>

#include "../../torch/c10d/without_interpreter.h"

namespace pycollect::dist {

FakeStreams::~FakeStreams() {
  {
    const std::lock_guard lock(mutex);
    closed_ = true;
  }
  changed_.notify_all();
  const WithoutInterpreter without;
  if (thread_.joinable()) thread_.join();
}

std::size_t FakeStreams::add() {
  streams_.emplace_back();
  return streams_.size() - 1;
}

void FakeStreams::enqueue(std::size_t stream, Work work) {
  streams_[stream].work.push_back(std::move(work));
  ++streams_[stream].enqueued;
  changed_.notify_all();
}

bool FakeStreams::step(std::size_t stream) {
  Stream& s = streams_[stream];
  if (s.work.empty() || is_stalled(stream)) return false;
  if (!s.work.front()()) return false;
  if (thread_.joinable()) {
    spent_.push_back(std::move(s.work.front()));
    changed_.notify_all();
  }
  s.work.pop_front();
  ++s.done;
  return true;
}

bool FakeStreams::advance(std::size_t stream, std::size_t to) {
  while (streams_[stream].done < to)
    if (!step(stream)) return false;
  return true;
}

void FakeStreams::run_by_themselves() {
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
}

void FakeStreams::serve() {
  std::unique_lock lock(mutex);
  while (!closed_) {
    bool any = false;
    for (std::size_t s = 0; s < streams_.size(); ++s) any |= !streams_[s].work.empty();
    if (!any && spent_.empty()) {
      changed_.wait(lock);
      continue;
    }
    for (std::size_t s = 0; s < streams_.size(); ++s)
      while (step(s) && eager_) {
      }
    std::vector<Work> spent;
    spent.swap(spent_);
    lock.unlock();
    spent.clear();
    lock.lock();
    changed_.wait_for(lock, pause_, [&] { return closed_; });
  }
}

void FakeStreams::drain(std::size_t stream) {
  std::unique_lock lock(mutex);
  const std::size_t to = streams_[stream].enqueued;
  while (!advance(stream, to) && thread_.joinable() && !is_stalled(stream)) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
  }
}

}  // namespace pycollect::dist
