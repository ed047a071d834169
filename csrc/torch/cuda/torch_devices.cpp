// torch's CUDA devices as the backend for processes asks for them: its streams, its pinned memory,
// whose blocks it gives to nobody before the copies that touch them are done, and its own copies.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>

#include "../../plan/error.h"
#include "../c10d/devices/devices.h"
#include "../job.h"
#include "beside.h"
#include "ipc_gpu.h"
#include "tract_pool.h"

namespace pycollect::dist {
namespace {

using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;

class CudaMark final : public Mark {
 public:
  explicit CudaMark(const CUDAStream& stream) : event_(at::kCUDA) {
    event_.record(stream.unwrap());
  }

  bool reached() override {
    const Beside beside(event_.device());
    return event_.query();
  }
  void hold_current(at::Device device) override {
    hold(c10::cuda::getCurrentCUDAStream(device.index()));
  }
  void hold(const CUDAStream& stream) { event_.block(stream.unwrap()); }

 private:
  c10::Event event_;
};

// Also of inference tensors; autograd does not see it.
void copy_unseen(const at::Tensor& dst, const at::Tensor& src) {
  const at::AutoDispatchBelowADInplaceOrView as_memory;
  dst.copy_(src, /*non_blocking=*/true);
}

// The current one where there is no number.
at::Device named(at::Device device) {
  return device.has_index() ? device : at::Device(device.type(), c10::cuda::current_device());
}

class TorchDevices final : public Devices {
 public:
  explicit TorchDevices(std::shared_ptr<slabs::Gpu> gpu) : gpu_(std::move(gpu)) {}

  bool serves(const at::Tensor& tensor) const override { return tensor.is_cuda(); }
  bool has(at::Device device) const override { return device.is_cuda(); }
  bool is_capturing(at::Device device) override;
  at::Tensor new_pinned(const at::Tensor& like) override;
  void copy_out(const Way& way) override;
  void compute(const at::Tensor& into, const at::Tensor&, const Computation& how) override {
    how(into);
  }
  std::unique_ptr<Mark> mark(at::Device device) override;
  void follow(at::Device device, Mark& after) override;
  std::unique_ptr<Mark> finish(at::Device device, const std::vector<Way>& ways,
                               const std::vector<at::Tensor>& kept) override;
  std::shared_ptr<slabs::Gpu> gpu() override { return gpu_; }
  slabs::Stream stream(at::Device device) override {
    const Beside beside(device);
    return {device.index(), back(device).stream()};
  }
  at::Tensor new_dense(const at::Tensor& like, at::Device device) override;
  at::Tensor new_in_tract(const std::shared_ptr<slabs::Tracts>& tracts, at::Device device,
                          int64_t count, at::ScalarType type) override;
  void drop_pools() override;
  std::shared_ptr<Devices> twin() override { return std::make_shared<TorchDevices>(gpu_); }
  void with_results(c10::ArrayRef<at::Device> devices, c10::function_ref<void()> act) override;

 private:
  CUDAStream back(at::Device device);
  std::shared_ptr<TractPool> make_pool(at::Device device,
                                       const std::shared_ptr<slabs::Tracts>& tracts);
  std::shared_ptr<TractPool> pool_on(at::Device device,
                                     const std::shared_ptr<slabs::Tracts>& tracts);

  const std::shared_ptr<slabs::Gpu> gpu_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, CUDAStream> back_;  // [device]: the group's stream there
  std::map<c10::DeviceIndex, std::shared_ptr<TractPool>> pools_;  // [device]
};

bool TorchDevices::is_capturing(at::Device device) {
  const CUDAGuard guard(named(device));
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// Not through the dispatcher, whose modes may put something without memory in its place.
at::Tensor TorchDevices::new_pinned(const at::Tensor& like) {
  const Beside beside(like.device());
  return at::Tensor(at::detail::empty_cpu(like.sizes(), like.scalar_type(), /*pin_memory=*/true));
}

void TorchDevices::copy_out(const Way& way) {
  const CUDAGuard guard(way.tensor.device());
  copy_unseen(way.dense, way.tensor);
}

std::unique_ptr<Mark> TorchDevices::mark(at::Device device) {
  return std::make_unique<CudaMark>(c10::cuda::getCurrentCUDAStream(device.index()));
}

CUDAStream TorchDevices::back(at::Device device) {
  const std::lock_guard lock(mutex_);
  const auto found = back_.find(device.index());
  if (found != back_.end()) return found->second;
  const CUDAStream fresh = c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index());
  return back_.emplace(device.index(), fresh).first->second;
}

at::Tensor TorchDevices::new_dense(const at::Tensor& like, at::Device device) {
  const CUDAGuard guard(device);
  return at::Tensor(at::detail::empty_cuda(like.sizes(), like.scalar_type(), device, std::nullopt));
}

at::Tensor TorchDevices::new_in_tract(const std::shared_ptr<slabs::Tracts>& tracts,
                                      at::Device device, int64_t count, at::ScalarType type) {
  device = named(device);
  if (const auto pool = pool_on(device, tracts)) return pool->empty(count, type);
  const CUDAGuard guard(device);
  return at::Tensor(at::detail::empty_cuda({count}, type, device, std::nullopt));
}

// At the second attempt where there is room only then.
std::shared_ptr<TractPool> TorchDevices::make_pool(at::Device device,
                                                   const std::shared_ptr<slabs::Tracts>& tracts) {
  try {
    return std::make_shared<TractPool>(tracts, device);
  } catch (const std::runtime_error&) {
    gpu_->make_room(device.index());
    return std::make_shared<TractPool>(tracts, device);
  }
}

// Null: no memory goes to other processes there, which the log says once. Made without the lock.
std::shared_ptr<TractPool> TorchDevices::pool_on(at::Device device,
                                                 const std::shared_ptr<slabs::Tracts>& tracts) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = pools_.find(device.index());
    if (found != pools_.end()) return found->second;
  }
  std::shared_ptr<TractPool> made;
  try {
    made = make_pool(device, tracts);
  } catch (const std::runtime_error& error) {
    say_once(text("no tensors on ", device, " that other processes reach: ", error.what()));
  }
  const std::lock_guard lock(mutex_);
  return pools_.emplace(device.index(), made).first->second;
}

void TorchDevices::drop_pools() {
  std::map<c10::DeviceIndex, std::shared_ptr<TractPool>> gone;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  gone.swap(pools_);
}

void TorchDevices::follow(at::Device device, Mark& after) {
  const Beside beside(device);
  static_cast<CudaMark&>(after).hold(back(device));
}

// A copy to another device is of both devices' current streams: what follows on the group's stream
// there comes behind it as well.
std::unique_ptr<Mark> TorchDevices::finish(at::Device device, const std::vector<Way>& ways,
                                           const std::vector<at::Tensor>& kept) {
  const Beside beside(device);
  const CUDAStream stream = back(device);
  const c10::cuda::CUDAStreamGuard guard(stream);
  const auto keep = [&](const at::Tensor& t) {
    if (!t.is_cuda()) return;  // pinned memory's copies do so themselves
    c10::cuda::CUDACachingAllocator::recordStream(t.storage().data_ptr(), stream);
  };
  for (const at::Tensor& t : kept) keep(t);
  for (const Way& way : ways) {
    keep(way.tensor);
    copy_unseen(way.tensor, way.dense);
  }
  auto end = std::make_unique<CudaMark>(stream);
  for (const Way& way : ways)
    if (way.tensor.is_cuda() && way.tensor.device() != device) end->hold(back(way.tensor.device()));
  return end;
}

void TorchDevices::with_results(c10::ArrayRef<at::Device> devices, c10::function_ref<void()> act) {
  if (devices.empty()) return act();
  const Beside beside(devices.front());
  std::vector<CUDAStream> streams;
  for (at::Device d : devices) streams.push_back(back(d));
  const c10::cuda::CUDAMultiStreamGuard guard(streams);
  act();
}

}  // namespace

std::shared_ptr<Devices> torch_devices() { return std::make_shared<TorchDevices>(ipc_gpu()); }

}  // namespace pycollect::dist
