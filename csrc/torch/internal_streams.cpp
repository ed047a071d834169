#include "internal_streams.h"

#include <utility>

namespace pycollect {

cuda::Stream InternalStreams::stream(cuda::Device device, std::size_t number) {
  const std::lock_guard lock(mutex_);
  const auto [at, is_new] = streams_.try_emplace({device, number});
  if (!is_new) return at->second;
  try {
    at->second = runtime_.new_stream({kind_, static_cast<c10::DeviceIndex>(device)});
  } catch (...) {
    streams_.erase(at);
    throw;
  }
  return at->second;
}

// Recorded and stored under one lock, so that the event stored last is the last of the stream.
std::shared_ptr<cuda::SharedEvent> InternalStreams::record_async(cuda::EventPool& events,
                                                                 cuda::Device device,
                                                                 bool for_capture) {
  const cuda::Stream on = side(device);
  std::shared_ptr<cuda::SharedEvent> former;  // given back without the lock
  const std::lock_guard lock(mutex_);
  auto end = std::make_shared<cuda::SharedEvent>(events, on, for_capture);
  former = std::exchange(last_async_[device], end);
  return end;
}

std::shared_ptr<cuda::SharedEvent> InternalStreams::last_async(cuda::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto found = last_async_.find(device);
  return found == last_async_.end() ? nullptr : found->second;
}

StreamSets::StreamSets(TorchRuntime& runtime, c10::DeviceType kind)
    : runtime_(runtime), kind_(kind), eager_(std::make_shared<InternalStreams>(runtime, kind)) {}

std::shared_ptr<InternalStreams> StreamSets::of(uint64_t capture) {
  if (capture == 0) return eager_;
  std::unique_ptr<InternalStreams> set;
  {
    const std::lock_guard lock(idle_->mutex);
    std::erase_if(captured_, [](const auto& entry) { return entry.second.expired(); });
    if (auto known = captured_[capture].lock()) return known;
    if (!idle_->sets.empty()) {
      set = std::move(idle_->sets.back());
      idle_->sets.pop_back();
    }
  }
  if (set == nullptr) set = std::make_unique<InternalStreams>(runtime_, kind_);
  set->kept_ = false;
  set->last_async_.clear();  // here, because destroying an event calls CUDA
  const std::shared_ptr<InternalStreams> shared(set.release(), [idle = idle_](InternalStreams* s) {
    const std::lock_guard lock(idle->mutex);
    idle->sets.emplace_back(s);
  });
  const std::lock_guard lock(idle_->mutex);
  captured_[capture] = shared;
  return shared;
}

}  // namespace pycollect
