// See coalescing.h.
#include "coalescing.h"

namespace pycollect::dist {
namespace {

// Returns a number of the calling thread that no other thread has had. The system reuses a
// std::thread::id after its thread has ended: the new thread would find a list that the old one had
// left open.
uint64_t this_thread() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t number = threads++;
  return number;
}

}  // namespace

CoalescedList* Coalescing::find() {
  if (threads_ == 0 || closed_) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = lists_.find(this_thread());
  return found == lists_.end() ? nullptr : &found->second;
}

void Coalescing::start() {
  const std::lock_guard lock(mutex_);
  lists_.try_emplace(this_thread());
  threads_ = static_cast<int>(lists_.size());
}

std::optional<CoalescedList> Coalescing::take() {
  const std::lock_guard lock(mutex_);
  const auto found = lists_.find(this_thread());
  if (found == lists_.end()) return std::nullopt;
  std::optional<CoalescedList> list(std::move(found->second));
  lists_.erase(found);
  threads_ = static_cast<int>(lists_.size());
  return list;
}

}  // namespace pycollect::dist
