// See devices.h.
#include "devices.h"

#include "../../../plan/error.h"
#include "../../job.h"

namespace pycollect::dist {

using cuda::Beside;
using cuda::Stream;

Mark::Mark(std::shared_ptr<TorchRuntime> torch, Stream stream) : torch_(std::move(torch)) {
  cuda::Api& api = torch_->cuda();
  const Beside beside(api, stream.device);
  event_ = api.create_event(stream.device);
  try {
    api.record(event_, stream);
  } catch (...) {
    api.destroy(event_);
    throw;
  }
}

Mark::~Mark() { torch_->cuda().destroy(event_); }

bool Mark::reached() const {
  const Beside beside(torch_->cuda(), event_.device);
  return torch_->cuda().query(event_);
}

void Mark::hold(Stream stream) const {
  const Beside beside(torch_->cuda(), stream.device);
  torch_->cuda().wait(stream, event_);
}

namespace {

std::shared_ptr<slabs::Gpu> gpu_of(const std::shared_ptr<TorchRuntime>& torch) {
  if (!torch || !torch->shares_memory()) return nullptr;
  return std::make_shared<slabs::Gpu>(torch->cuda(), [torch] { torch->empty_cache(); });
}

}  // namespace

Devices::Devices(std::shared_ptr<TorchRuntime> torch)
    : torch_(std::move(torch)), gpu_(gpu_of(torch_)) {}

bool Devices::is_capturing(at::Device device) {
  const Stream stream = torch_->current_stream(torch_->with_index(device));
  cuda::CurrentDevice current(torch_->cuda());
  current.use(stream.device);
  return torch_->cuda().is_capturing(stream);
}

at::Tensor Devices::new_pinned(const at::Tensor& like) {
  const Beside beside(torch_->cuda(), torch_->current_stream(like.device()).device);
  return torch_->empty_pinned(like.sizes(), like.scalar_type());
}

at::Tensor Devices::new_dense(const at::Tensor& like, at::Device device) {
  return torch_->empty(like.sizes(), like.scalar_type(), device);
}

void Devices::copy_out(const Way& way) { torch_->copy(way.dense, way.tensor); }

std::unique_ptr<Mark> Devices::mark(at::Device device) {
  return std::make_unique<Mark>(torch_, torch_->current_stream(device));
}

Stream Devices::stream(at::Device device) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(device.index());
  if (found != streams_.end()) return found->second;
  return streams_.emplace(device.index(), torch_->new_stream(device)).first->second;
}

std::vector<Stream> Devices::streams(const std::vector<at::Device>& devices) {
  std::vector<Stream> all;
  for (at::Device d : devices) all.push_back(stream(d));
  return all;
}

// A copy to another device is of both devices' current streams: what follows on the group's stream
// there comes behind it as well.
std::unique_ptr<Mark> Devices::finish(at::Device device, const std::vector<Way>& ways,
                                      const std::vector<at::Tensor>& kept) {
  const Stream own = stream(device);
  const Beside beside(torch_->cuda(), own.device);
  for (const at::Tensor& t : kept) torch_->record_stream(t, own);
  torch_->with_streams(own, [&] {
    for (const Way& way : ways) {
      torch_->record_stream(way.tensor, own);
      torch_->copy(way.tensor, way.dense);
    }
  });
  auto end = std::make_unique<Mark>(torch_, own);
  for (const Way& way : ways)
    if (serves(way.tensor) && way.tensor.device() != device) end->hold(stream(way.tensor.device()));
  return end;
}

void Devices::with_results(const std::vector<at::Device>& devices, c10::function_ref<void()> act) {
  if (devices.empty()) return act();
  const std::vector<Stream> results = streams(devices);
  const Beside beside(torch_->cuda(), results.front().device);
  torch_->with_streams(results, act);
}

void Devices::complete(const std::vector<at::Device>& devices, c10::function_ref<void()> act) {
  if (devices.empty()) return act();
  const std::vector<Stream> results = streams(devices);
  const Beside beside(torch_->cuda(), results.front().device);
  torch_->complete(results, act);
}

at::Tensor Devices::new_in_tract(const std::shared_ptr<slabs::Tracts>& tracts, at::Device device,
                                 int64_t count, at::ScalarType type) {
  device = torch_->with_index(device);
  if (const auto pool = pool_on(device, tracts)) return pool->empty(count, type);
  return torch_->empty({count}, type, device);
}

// At the second attempt where there is room only then.
std::shared_ptr<Pool> Devices::make_pool(at::Device device,
                                         const std::shared_ptr<slabs::Tracts>& tracts) {
  try {
    return torch_->new_pool(tracts, device);
  } catch (const std::runtime_error&) {
    torch_->empty_cache();
    return torch_->new_pool(tracts, device);
  }
}

// Null: no memory goes to other processes there, which the log says once. Made without the lock.
std::shared_ptr<Pool> Devices::pool_on(at::Device device,
                                       const std::shared_ptr<slabs::Tracts>& tracts) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = pools_.find(device.index());
    if (found != pools_.end()) return found->second;
  }
  std::shared_ptr<Pool> made;
  try {
    made = make_pool(device, tracts);
  } catch (const std::runtime_error& error) {
    say_once(text("no tensors on ", device, " that other processes reach: ", error.what()));
  }
  const std::lock_guard lock(mutex_);
  return pools_.emplace(device.index(), made).first->second;
}

void Devices::drop_pools() {
  std::map<c10::DeviceIndex, std::shared_ptr<Pool>> gone;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  gone.swap(pools_);
}

}  // namespace pycollect::dist
