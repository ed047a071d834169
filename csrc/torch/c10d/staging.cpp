// See staging.h.
#include "staging.h"

#include <algorithm>
#include <thread>

#include "../../plan/error.h"

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

namespace {

// Host staging, the way of device tensors between processes: tensors are copied to pinned memory on
// the caller's stream, the host executor runs there, and the results are copied back on a stream of
// the group. wait() blocks until the executor is done. The extra cost is one copy of whole tensors
// in each direction.
class HostStaging final : public TensorStaging {
 public:
  explicit HostStaging(std::shared_ptr<DeviceOps> devices) : devices_(std::move(devices)) {}

  ipc::BufferSpan add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
  void begin_copy_in() override;
  bool inputs_ready() override;
  void begin_copy_out() override;
  bool outputs_ready() override;
  void wait_on_current_streams() override;
  void release() override;
  const std::vector<at::Device>& on() const override { return on_; }
  DeviceOps& devices() const override { return *devices_; }

 private:
  struct DeviceCopies {  // copies and events of the call on one device
    std::vector<CopyPair> in = {}, out = {};
    std::unique_ptr<DeviceEvent> copied_in = {};
    std::shared_ptr<DeviceEvent> outputs_ready = {};
    bool inputs_ready = false;
  };
  DeviceCopies& copies_on(at::Device device);

  const std::shared_ptr<DeviceOps> devices_;
  std::vector<at::Device> on_;
  std::vector<DeviceCopies> copies_;  // in the same order as on_
};

HostStaging::DeviceCopies& HostStaging::copies_on(at::Device device) {
  const auto found = std::find(on_.begin(), on_.end(), device);
  if (found != on_.end()) return copies_[found - on_.begin()];
  on_.push_back(device);
  return copies_.emplace_back();
}

ipc::BufferSpan HostStaging::add_tensor(const at::Tensor& tensor, bool reads, bool writes) {
  DeviceCopies& copies = copies_on(tensor.device());
  if (tensor.numel() == 0) return {nullptr, 0};
  const CopyPair pair{tensor, devices_->new_pinned(tensor)};
  if (reads) copies.in.push_back(pair);
  if (writes) copies.out.push_back(pair);
  return {static_cast<std::byte*>(pair.dense.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

void HostStaging::begin_copy_in() {
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    DeviceCopies& copies = copies_[i];
    for (const CopyPair& pair : copies.in) devices_->torch().copy(pair.dense, pair.tensor);
    if (!copies.in.empty() || !copies.out.empty())
      copies.copied_in = devices_->record_event(on_[i]);
    copies.inputs_ready = copies.in.empty();  // no host wait for tensors that are only overwritten
  }
}

bool HostStaging::inputs_ready() {
  for (DeviceCopies& copies : copies_) {
    if (!copies.inputs_ready) copies.inputs_ready = copies.copied_in->reached();
    if (!copies.inputs_ready) return false;
  }
  return true;
}

void HostStaging::begin_copy_out() {
  for (std::size_t i = 0; i < copies_.size(); ++i)
    if (DeviceCopies& copies = copies_[i]; !copies.out.empty()) {
      devices_->wait_for(on_[i], *copies.copied_in);
      copies.outputs_ready = devices_->finish(on_[i], copies.out, {});
    }
  release();
}

bool HostStaging::outputs_ready() {
  return std::all_of(copies_.begin(), copies_.end(), [](DeviceCopies& copies) {
    return copies.outputs_ready == nullptr || copies.outputs_ready->reached();
  });
}

void HostStaging::wait_on_current_streams() {
  for (std::size_t i = 0; i < copies_.size(); ++i)
    if (copies_[i].outputs_ready) copies_[i].outputs_ready->block_current(on_[i]);
}

void HostStaging::release() {
  for (DeviceCopies& copies : copies_) {
    copies.in.clear();
    copies.out.clear();
  }
}

}  // namespace

std::shared_ptr<TensorStaging> stage_through_host(std::shared_ptr<DeviceOps> devices) {
  return std::make_shared<HostStaging>(std::move(devices));
}

void check_no_capture(const TensorStaging& staging, const char* operation) {
  for (at::Device d : staging.on())
    require(!staging.devices().is_capturing(d), operation,
            ": wait() was called while the current stream of ", d,
            " is under capture; wait before the capture begins");
}

void StreamOrdering::add_device(at::Device device) {
  if (std::find(on_.begin(), on_.end(), device) == on_.end()) on_.push_back(device);
}

void StreamOrdering::add_whole(const at::Tensor& tensor) {
  add_device(tensor.device());
  tensors_.push_back(tensor);
}

ipc::BufferSpan StreamOrdering::add_tensor(const at::Tensor& tensor, bool reads, bool writes) {
  const at::Device device = tensor.device();
  add_device(device);
  if (tensor.numel() == 0) return {nullptr, 0};
  at::Tensor dense = tensor;
  if (!tensor.is_contiguous()) {
    dense = devices_->torch().empty(tensor.sizes(), tensor.scalar_type(), device);
    if (reads) in_.push_back({tensor, dense});
    if (writes) out_.push_back({tensor, dense});
    tensors_.push_back(tensor);
  }
  tensors_.push_back(dense);
  return {static_cast<std::byte*>(const_cast<void*>(dense.const_data_ptr())),
          static_cast<std::size_t>(dense.numel())};
}

void StreamOrdering::begin_copy_in() {
  for (const CopyPair& pair : in_) devices_->torch().copy(pair.dense, pair.tensor);
  in_.clear();
  inputs_.clear();
  for (at::Device d : on_) inputs_.push_back(devices_->record_event(d));
}

void StreamOrdering::wait_for_inputs() {
  for (std::size_t i = 0; i < on_.size(); ++i) {
    inputs_[i]->block_current(on_[i]);
    const cuda::Stream stream = devices_->torch().current_stream(on_[i]);
    for (const at::Tensor& t : tensors_)
      if (t.device() == on_[i]) devices_->torch().record_stream(t, stream);
  }
}

void StreamOrdering::begin_copy_out() {
  for (const CopyPair& pair : out_) devices_->torch().copy(pair.tensor, pair.dense);
  out_.clear();
  for (at::Device d : on_) outputs_.push_back(devices_->record_event(d));
}

bool StreamOrdering::outputs_ready() {
  return std::all_of(outputs_.begin(), outputs_.end(), [](const auto& e) { return e->reached(); });
}

void StreamOrdering::wait_on_current_streams() {
  for (std::size_t i = 0; i < outputs_.size(); ++i) outputs_[i]->block_current(on_[i]);
}

void StreamOrdering::complete(c10::function_ref<void()> act) {
  devices_->complete(on_, [&] {
    wait_on_current_streams();
    act();
  });
}

void StreamOrdering::release() {
  tensors_.clear();
  in_.clear();
  out_.clear();
}

}  // namespace pycollect::dist
