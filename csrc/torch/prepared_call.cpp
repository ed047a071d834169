#include "prepared_call.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "../plan/error.h"
#include "float8.h"
#include "gpus.h"
#include "log.h"
#include "profiler_range.h"
#include "threads.h"

namespace pycollect {
namespace {

void log_choice(const CallKey& s, const Choice& choice) {
  log_once(text(name(s.collective), " of ", s.bytes, " bytes of ", name(s.dtype), " on ", s.world,
                " ranks: ", choice.algorithm->name, " (", choice.reason, ")"));
}

bool any_gpu(const std::vector<at::Device>& devices) {
  return std::any_of(devices.begin(), devices.end(), [](at::Device d) { return !d.is_cpu(); });
}

at::Device first_gpu(const std::vector<at::Device>& devices) {
  return *std::find_if(devices.begin(), devices.end(), [](at::Device d) { return !d.is_cpu(); });
}

// Not through the dispatcher on the host, whose modes may put something without memory in its
// place.
at::Tensor new_bytes(int64_t bytes, at::Device device) {
  if (device.is_cpu()) return at::Tensor(at::detail::empty_cpu({bytes}, at::kByte));
  return new_bytes_on_gpu(bytes, device);
}

}  // namespace

DtypePlan make_dtype_plan(CallKey s, std::string_view algorithm, Rank root, ReduceOp op,
                          const PreparedCall& call) {
  const bool on_gpus = call.on_gpus();
  if (on_gpus) s.topology = topology_of(call.devices, call.peer_access);
  const Choice choice = choose(s, algorithm, is_logging());
  if (is_logging()) log_choice(s, choice);
  FoldOptions options{.world = s.world, .non_temporal = !s.in_place};
  if (item_bytes(s.dtype) == 1) options.float8 = float8_rounding();
  auto plan = on_gpus ? compiled_for(choice, s, root, call.devices, call.peer_access)
                      : compiled(*choice.algorithm, {s.world, root, choice.pieces}, s.in_place);
  return {std::move(plan), s.dtype, op, options, !algorithm.empty()};
}

void DtypePlan::bind(const Offsets* at, std::vector<Memory> memory, std::size_t rows,
                     PreparedCall& job) {
  auto add = [&](Rank r, Buffer buffer, auto&& make) {
    const auto bytes = static_cast<int64_t>(at->total(r, buffer) * item_bytes(dtype));
    const int64_t pitch = (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    job.held.push_back(make(pitch * static_cast<int64_t>(rows)));
    memory[r * kBuffers + static_cast<int>(buffer)] = {
        static_cast<std::byte*>(job.held.back().mutable_data_ptr()), pitch};
  };
  const bool on_gpus = job.on_gpus();
  for (Rank r = 0; r < compiled->plan.world; ++r) {
    for (int b = 0; on_gpus && job.devices[r].is_cpu() && b <= 1; ++b)  // input and output
      if (Memory& m = memory[r * kBuffers + b]; m.base != nullptr) m.pageable = is_pageable(m.base);
    const at::Device gpu =
        job.devices[r].is_cpu() && on_gpus ? first_gpu(job.devices) : job.devices[r];
    if (compiled->scratched[r])
      add(r, Buffer::scratch, [&](int64_t bytes) {
        const bool shared = job.devices[r].is_cpu() && on_gpus;  // GPUs work there, too
        return shared ? new_pinned_bytes(bytes, gpu) : new_bytes(bytes, job.devices[r]);
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

bool PreparedCall::on_gpus() const { return any_gpu(devices); }

void PreparedCall::run() const {
  const ProfilerRange here(call);
  if (on_gpus()) return run_on_gpus(*this);
  for (const DtypePlan& p : parts)
    cpu::run({*p.compiled, p.bindings, p.dtype, p.op, p.options}, threads());
  for (const auto& [dst, src] : transposes) copy_strided(dst, src);
}

}  // namespace pycollect
