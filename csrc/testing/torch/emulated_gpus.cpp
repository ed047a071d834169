// See emulated_gpus.h.
#include "emulated_gpus.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "../../torch/gpus.h"

namespace pycollect {

using cuda::Device;
using cuda::MemoryKind;
using cuda::Stream;

namespace {

constexpr std::size_t kUnit = 512;  // bytes; torch rounds sizes up to a multiple

std::byte* memory_of(const at::Tensor& t) {
  return static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr()));
}

// The bytes from the first element to the end of the last one.
std::size_t extent_of(const at::Tensor& t) {
  std::size_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return t.numel() == 0 ? 0 : (last + 1) * t.element_size();
}

// A CPU tensor over the same memory.
at::Tensor on_cpu(const at::Tensor& t) {
  return at::from_blob(memory_of(t), t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
}

EmulatedGpus& emulated() {
  return dynamic_cast<EmulatedGpus&>(gpu_calls(EmulatedGpus::kKind).runtime());
}

}  // namespace

EmulatedGpus::EmulatedGpus(int devices) : emulator_(cuda::Emulator::recording(devices)) {
  for (Device d = 0; d < devices; ++d) {
    current_.push_back(emulator_->create_stream(d));
    for (Device other = 0; other < devices; ++other) emulator_->connect(d, other);
  }
}

at::Device EmulatedGpus::with_index(at::Device device) const {
  return device.has_index() ? device : at::Device(kKind, 0);
}

// The emulator numbers its streams from 1.
Stream EmulatedGpus::stream_of(c10::Stream stream) {
  return {stream.device_index(), reinterpret_cast<void*>(stream.id())};
}

Stream EmulatedGpus::new_stream(at::Device device) {
  return emulator_->create_stream(device.index());
}

void EmulatedGpus::with_streams(c10::ArrayRef<Stream> streams, c10::function_ref<void()> act) {
  std::vector<Stream> before;
  for (const Stream& s : streams) {
    before.push_back(current_.at(s.device));
    use(s);
  }
  act();
  for (const Stream& s : before) use(s);  // in torch's order
}

// Torch returns memory to a graph's pool only on the device on which the capture has begun.
uint64_t EmulatedGpus::pool_of(Stream stream) const {
  if (stream.device != capture_device_) return 0;
  cuda::DeviceGuard device(*emulator_);
  device.use(stream.device);
  return emulator_->capture_id(stream);
}

at::Tensor EmulatedGpus::tensor_in(MemoryKind kind, at::IntArrayRef sizes, at::ScalarType type,
                                   at::Device device, Stream stream) {
  const auto count = static_cast<std::size_t>(c10::multiply_integers(sizes));
  const std::size_t bytes =
      std::max<std::size_t>((count * at::elementSize(type) + kUnit - 1) / kUnit, 1) * kUnit;
  const bool pinned = kind == MemoryKind::pinned;
  const GpuBlock wanted{bytes, pinned ? cuda::kHost : stream.device,
                        pinned ? 0 : emulator_->number(stream), pool_of(stream)};
  const auto fits = [&](const auto& entry) {
    const GpuBlock& b = entry.second;
    return !b.in_use && !b.recorded && b.bytes == bytes && b.device == wanted.device &&
           b.stream == wanted.stream && b.capture == wanted.capture;
  };
  auto found = std::find_if(blocks_.begin(), blocks_.end(), fits);
  if (found == blocks_.end())
    found = blocks_.emplace(emulator_->allocate(kind, stream.device, bytes), wanted).first;
  found->second.in_use = true;
  const auto free = [self = shared_from_this(), at = found->first](void*) {
    self->blocks_.at(at).in_use = false;
  };
  return at::for_blob(found->first, sizes)
      .deleter(free)
      .target_device(device)
      .options(at::TensorOptions(type).device(device))
      .make_tensor();
}

at::Tensor EmulatedGpus::empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  return tensor_in(MemoryKind::device, sizes, type, device, current_stream(device));
}

// The tensor is not marked as pinned, because torch asks the accelerator, and there is none.
at::Tensor EmulatedGpus::empty_pinned(at::IntArrayRef sizes, at::ScalarType type) {
  emulator_->enter("new_pinned");
  emulator_->require_no_capture("allocation of pinned memory");
  const at::Device current(kKind, static_cast<c10::DeviceIndex>(emulator_->current_device()));
  return tensor_in(MemoryKind::pinned, sizes, type, at::kCPU, current_stream(current));
}

bool EmulatedGpus::record_stream(const at::Tensor& tensor, Stream stream) {
  ++recorded_;
  auto after = blocks_.upper_bound(memory_of(tensor));
  if (after == blocks_.begin()) return false;
  const auto& found = std::prev(after);
  GpuBlock& block = found->second;
  if (memory_of(tensor) >= found->first + block.bytes) return false;
  const bool pinned = block.device == cuda::kHost;
  block.recorded |= pinned || emulator_->number(stream) != block.stream;
  return true;
}

bool EmulatedGpus::is_pageable(const void* address) {
  return emulator_->kind_of(static_cast<const std::byte*>(address)) == MemoryKind::pageable;
}

bool EmulatedGpus::reaches(at::Device from, at::Device to) { return connected_ || from == to; }

void EmulatedGpus::run_list_call(const PreparedCall& call) { gpu_calls(kKind).run(call); }

void EmulatedGpus::enqueue(const char* what, const at::Tensor& tensor, bool writes,
                           std::function<void()> act) {
  const Stream stream = current_stream(tensor.device());
  cuda::DeviceGuard device(*emulator_);
  device.use(stream.device);
  emulator_->stream_work(stream, what, {{memory_of(tensor), extent_of(tensor), writes, 0}},
                         std::move(act));
}

void EmulatedGpus::write(const at::Tensor& tensor, const at::Tensor& values) {
  enqueue("the caller's write", tensor, true,
          [to = on_cpu(tensor), from = values.clone()] { to.copy_(from); });
}

at::Tensor EmulatedGpus::read(const at::Tensor& tensor) {
  at::Tensor values(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
  enqueue("the caller's read", tensor, false,
          [to = values, from = on_cpu(tensor)] { to.copy_(from); });
  return values;
}

// One access of both tensors: a copy between layouts on one device, or to or from the host.
void EmulatedGpus::copy(const at::Tensor& to, const at::Tensor& from) {
  const Stream stream = current_stream(to.is_cpu() ? from.device() : to.device());
  cuda::DeviceGuard device(*emulator_);
  device.use(stream.device);
  emulator_->stream_work(
      stream, "a copy by torch",
      {{memory_of(to), extent_of(to), true, 0}, {memory_of(from), extent_of(from), false, 0}},
      [a = on_cpu(to), b = on_cpu(from)] { a.copy_(b); });
}

void EmulatedGpus::compute(const at::Tensor&, const at::Tensor&, const Computation&) {
  throw std::logic_error("emulated GPUs compute nothing");
}

void EmulatedGpus::adopt(const at::Tensor& tensor, bool pinned) {
  emulator_->adopt(pinned ? MemoryKind::pinned : MemoryKind::pageable, memory_of(tensor),
                   tensor.nbytes());
  adopted_.push_back(tensor);
}

int EmulatedGpus::blocks_in_use() const {
  return static_cast<int>(std::count_if(blocks_.begin(), blocks_.end(),
                                        [](const auto& entry) { return entry.second.in_use; }));
}

at::Tensor EmulatedGpus::foreign(int64_t count, c10::DeviceIndex index, int64_t offset) {
  const at::Device device(kKind, index);
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
  return at::for_blob(emulator_->allocate(MemoryKind::device, index, bytes) + offset, {count})
      .target_device(device)
      .options(at::TensorOptions(at::kFloat).device(device))
      .make_tensor();
}

void EmulatedGpus::begin_capture(Stream stream, bool by_torch) {
  if (by_torch) capture_device_ = stream.device;
  emulator_->begin_capture(stream);
}

int EmulatedGpus::end_capture(Stream stream) {
  capture_device_ = cuda::kHost;
  return emulator_->end_capture(stream);
}

void EmulatedGpus::run(int64_t seed) {
  if (seed < 0)
    run_as_issued(emulator_->trace());
  else
    run_shuffled(emulator_->trace(), static_cast<uint64_t>(seed));
  emulator_->clear_trace();
}

namespace {

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  return emulated().empty(sizes, type.value_or(at::kFloat), *device);
}

// Only of dense tensors.
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  return at::native::as_strided_tensorimpl(
      emulated().empty(sizes, type.value_or(at::kFloat), *device), sizes, strides, std::nullopt);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
  emulated().copy(to, from);
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("copy_", &copy_);
}

}  // namespace

}  // namespace pycollect
