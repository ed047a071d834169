// See device_ops.h.
#include "device_ops.h"

#include <thread>

namespace pycollect::dist {

constexpr std::chrono::microseconds kPollInterval{200};

using cuda::CaptureModeGuard;
using cuda::Stream;

DeviceEvent::DeviceEvent(std::shared_ptr<TorchRuntime> torch, Stream stream)
    : torch_(std::move(torch)) {
  cuda::Api& api = torch_->cuda();
  const CaptureModeGuard guard(api, stream.device);
  event_ = api.create_event(stream.device);
  try {
    api.record(event_, stream);
  } catch (...) {
    api.destroy(event_);
    throw;
  }
}

DeviceEvent::~DeviceEvent() { torch_->cuda().destroy(event_); }

bool DeviceEvent::reached() const {
  const CaptureModeGuard guard(torch_->cuda(), event_.device);
  return torch_->cuda().query(event_);
}

void DeviceEvent::block(Stream stream) const {
  const CaptureModeGuard guard(torch_->cuda(), stream.device);
  torch_->cuda().wait(stream, event_);
}

DeviceOps::DeviceOps(std::shared_ptr<TorchRuntime> torch) : torch_(std::move(torch)) {}

// Held tensors that await_held() has not released are leaked, because a device may still use them.
DeviceOps::~DeviceOps() {
  if (!held_.empty()) static_cast<void>(new auto(std::move(held_)));
  for (const auto& [device, stream] : streams_) torch_->give_back(stream);
}

bool DeviceOps::is_capturing(at::Device device) {
  const Stream stream = torch_->current_stream(torch_->with_index(device));
  cuda::DeviceGuard current(torch_->cuda());
  current.use(stream.device);
  return torch_->cuda().capture_id(stream) != 0;
}

at::Tensor DeviceOps::new_pinned(const at::Tensor& like) {
  const CaptureModeGuard guard(torch_->cuda(), torch_->current_stream(like.device()).device);
  return torch_->empty_pinned(like.sizes(), like.scalar_type());
}

std::unique_ptr<DeviceEvent> DeviceOps::record_event(at::Device device) {
  return std::make_unique<DeviceEvent>(torch_, torch_->current_stream(device));
}

Stream DeviceOps::stream(at::Device device) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(device.index());
  if (found != streams_.end()) return found->second;
  return streams_.emplace(device.index(), torch_->new_stream(device)).first->second;
}

std::vector<Stream> DeviceOps::streams(const std::vector<at::Device>& devices) {
  std::vector<Stream> all;
  for (at::Device d : devices) all.push_back(stream(d));
  return all;
}

// Adds tensors, and releases those whose event is reached. Releasing a tensor, as querying an
// event, is done without the lock: it can take the GIL, whose holder may be waiting for the lock.
void DeviceOps::hold(HeldTensors more) {
  std::vector<HeldTensors> all;
  {
    const std::lock_guard lock(mutex_);
    if (held_.empty() && more.tensors.empty()) return;
    all.swap(held_);
  }
  std::erase_if(all, [](const HeldTensors& held) {
    try {
      return held.until->reached();
    } catch (...) {  // the device has failed, but other work may still use the memory
      return false;
    }
  });
  if (!more.tensors.empty()) all.push_back(std::move(more));
  const std::lock_guard lock(mutex_);
  held_.insert(held_.end(), std::make_move_iterator(all.begin()),
               std::make_move_iterator(all.end()));
}

void DeviceOps::await_held(ipc::Deadline deadline) {
  const auto is_empty = [&] {
    const std::lock_guard lock(mutex_);
    return held_.empty();
  };
  for (hold({}); !is_empty() && ipc::Clock::now() < deadline; hold({}))
    std::this_thread::sleep_for(kPollInterval);
  std::vector<HeldTensors> rest;
  const std::lock_guard lock(mutex_);
  rest.swap(held_);
  if (!rest.empty()) static_cast<void>(new auto(std::move(rest)));  // a device may still use them
}

// A copy to another device occupies the current streams of both devices, so the group's stream
// there waits for the copy as well.
std::shared_ptr<DeviceEvent> DeviceOps::finish(at::Device device,
                                               const std::vector<CopyPair>& pairs,
                                               const std::vector<at::Tensor>& kept) {
  const Stream own = stream(device);
  const CaptureModeGuard guard(torch_->cuda(), own.device);
  HeldTensors held;
  const auto keep = [&](const at::Tensor& t) {
    if (!torch_->record_stream(t, own)) held.tensors.push_back(t);
  };
  std::shared_ptr<DeviceEvent> end;
  try {
    for (const at::Tensor& t : kept) keep(t);
    torch_->with_streams(own, [&] {
      for (const CopyPair& pair : pairs) {
        keep(pair.tensor);
        torch_->copy(pair.tensor, pair.dense);
      }
    });
    end = std::make_shared<DeviceEvent>(torch_, own);
  } catch (...) {  // no event tells when the device is done with the memory
    static_cast<void>(new auto(std::move(held.tensors)));
    throw;
  }
  held.until = end;
  hold(std::move(held));
  for (const CopyPair& pair : pairs)
    if (serves(pair.tensor) && pair.tensor.device() != device)
      end->block(stream(pair.tensor.device()));
  return end;
}

void DeviceOps::with_group_streams(const std::vector<at::Device>& devices,
                                   c10::function_ref<void()> act) {
  if (devices.empty()) return act();
  const std::vector<Stream> results = streams(devices);
  const CaptureModeGuard guard(torch_->cuda(), results.front().device);
  torch_->with_streams(results, act);
}

void DeviceOps::complete(const std::vector<at::Device>& devices, c10::function_ref<void()> act) {
  if (devices.empty()) return act();
  const std::vector<Stream> results = streams(devices);
  const CaptureModeGuard guard(torch_->cuda(), results.front().device);
  torch_->complete(results, act);
}

}  // namespace pycollect::dist
