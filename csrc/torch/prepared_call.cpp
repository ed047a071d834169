#include "prepared_call.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "../plan/error.h"
#include "float8_specials.h"
#include "gpus.h"
#include "log.h"
#include "profiler_range.h"
#include "threads.h"

namespace pycollect {
namespace {

void log_choice(const SelectionKey& key, const Choice& choice) {
  log_once(text(name(key.collective), " of ", key.bytes, " bytes of ", name(key.dtype), " on ",
                key.world, " ranks: ", choice.algorithm->name, " (", choice.reason, ")"));
}

bool any_gpu(const std::vector<at::Device>& devices) {
  return std::any_of(devices.begin(), devices.end(), [](at::Device d) { return !d.is_cpu(); });
}

at::Device first_gpu(const std::vector<at::Device>& devices) {
  return *std::find_if(devices.begin(), devices.end(), [](at::Device d) { return !d.is_cpu(); });
}

// Allocates bytes on the device. On the host it bypasses the dispatcher, whose modes may substitute
// a tensor without memory.
at::Tensor new_bytes(int64_t bytes, at::Device device) {
  if (device.is_cpu()) return at::Tensor(at::detail::empty_cpu({bytes}, at::kByte));
  return new_bytes_on_gpu(bytes, device);
}

}  // namespace

DtypePlan make_dtype_plan(SelectionKey key, std::string_view algorithm, Rank root, ReduceOp op,
                          const PreparedCall& prepared) {
  const bool on_gpus = prepared.on_gpus();
  if (on_gpus) key.topology = topology_of(prepared.devices, prepared.peer_access);
  const Choice choice = choose(key, algorithm, is_logging());
  if (is_logging()) log_choice(key, choice);
  FoldOptions options{.world = key.world, .non_temporal = !key.in_place};
  if (item_bytes(key.dtype) == 1) options.float8 = float8_specials();
  auto plan = on_gpus ? compiled_for(choice, key, root, prepared.devices, prepared.peer_access)
                      : compiled(*choice.algorithm, {key.world, root, choice.pieces}, key.in_place);
  return {std::move(plan), key.dtype, op, options, !algorithm.empty()};
}

void DtypePlan::bind(const PlanOffsets* at, std::vector<BufferMemory> memory, std::size_t rows,
                     PreparedCall& prepared) {
  auto add = [&](Rank r, Buffer buffer, auto&& make) {
    const auto bytes = static_cast<int64_t>(at->total(r, buffer) * item_bytes(dtype));
    const int64_t pitch = (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    on_stream_of(prepared.streams, r,
                 [&] { prepared.scratch.push_back(make(pitch * static_cast<int64_t>(rows))); });
    memory[r * kBuffers + static_cast<int>(buffer)] = {
        static_cast<std::byte*>(prepared.scratch.back().mutable_data_ptr()), pitch};
  };
  const bool on_gpus = prepared.on_gpus();
  for (Rank r = 0; r < compiled->plan.world; ++r) {
    for (int b = 0; on_gpus && prepared.devices[r].is_cpu() && b <= 1; ++b)  // input and output
      if (BufferMemory& m = memory[r * kBuffers + b]; m.base != nullptr)
        m.pageable = gpu_calls(prepared.kind()).runtime().is_pageable(m.base);
    const at::Device gpu =
        prepared.devices[r].is_cpu() && on_gpus ? first_gpu(prepared.devices) : prepared.devices[r];
    if (compiled->scratched[r])
      add(r, Buffer::scratch, [&](int64_t bytes) {
        const bool gpus_access = prepared.devices[r].is_cpu() && on_gpus;
        return gpus_access ? new_pinned_bytes(bytes, gpu) : new_bytes(bytes, prepared.devices[r]);
      });
    if (compiled->staged[r])
      add(r, Buffer::host, [&](int64_t bytes) { return new_pinned_bytes(bytes, gpu); });
  }
  bindings.push_back({at, std::move(memory), rows});
}

void PreparedCall::commit() {
  for (const at::Tensor& t : written)
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  written.clear();
}

void PreparedCall::add_layout_copy(const at::Tensor& dst, const at::Tensor& src, Rank rank) {
  scratch.push_back(dst);
  layout_copies.push_back({dst, src.detach(), rank});
}

bool PreparedCall::on_gpus() const { return any_gpu(devices); }
c10::DeviceType PreparedCall::kind() const { return first_gpu(devices).type(); }

void PreparedCall::run() const {
  const ProfilerRange range(call);
  if (on_gpus()) return gpu_calls(kind()).run(*this);
  run(threads());
}

void PreparedCall::run(const cpu::ParallelFor& parallel_for) const {
  for (const LayoutCopy& copy : layout_copies) copy_strided(copy.dst, copy.src);
  for (const DtypePlan& part : parts) cpu::run(part.bound(), parallel_for);
}

}  // namespace pycollect
