// Binds plans of tests: list calls that run one on given memory, staging, schedules and their
// predictions; and the peer-access cache. A schedule is a list of launches: (stream, tasks, indices
// of the launches to wait for, whether an event is recorded).
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../analysis/predict.h"
#include "../../cuda/peer_access.h"
#include "../../plan/error.h"
#include "../../plan/passes.h"
#include "../../torch/bindings.h"
#include "../../torch/gpus.h"
#include "bind.h"
#include "emulated_torch.h"

namespace pycollect {
namespace {

// Offsets of one tensor, and its memory in rows: [rank][buffer].
using TensorBinding = std::pair<PlanOffsets, Tensors>;

// Runs a plan as a list call on emulated GPUs; on host memory alone, step by step. `devices` and
// `streams` are [rank]; no streams: the current ones.
void run_plan(const CompiledPlan& compiled, const std::string& op,
              const std::vector<TensorBinding>& bindings, const DeviceList& devices,
              const std::vector<std::optional<cuda::Stream>>& streams) {
  const DType dtype = dtype_of(bindings.front().second.front(), {"run_plan", "bindings"});
  BoundPlan plan{compiled,
                 dtype,
                 static_cast<ReduceOp>(find_name("op", op, kReduceOpNames)),
                 {.world = compiled.plan.world}};
  ListCall call{.name = "run_plan", .devices = devices};
  for (const auto& [offsets, tensors] : bindings) {
    Binding binding{offsets, {}, static_cast<std::size_t>(tensors.front().size(0))};
    for (const at::Tensor& t : tensors) {
      auto* const base = static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr()));
      binding.memory.push_back({base, t.stride(0) * static_cast<std::ptrdiff_t>(t.element_size())});
      if (call.on_gpus() && t.is_cpu())
        binding.memory.back().pageable =
            gpu_calls(EmulatedTorch::kLists).runtime().is_pageable(base);
    }
    plan.bindings.push_back(std::move(binding));
  }
  if (!call.on_gpus()) return cpu::run_in_order(plan);
  for (const auto& s : streams)
    call.streams.push_back(
        s ? std::optional(c10::Stream::unpack3(
                static_cast<c10::StreamId>(reinterpret_cast<uintptr_t>(s->handle)),
                static_cast<c10::DeviceIndex>(s->device), EmulatedTorch::kLists))
          : std::nullopt);
  call.plans.push_back(std::move(plan));
  call.run();
}

void bind_compiled(py::module_& m) {
  py::class_<CompiledPlan>(m, "CompiledPlan")
      .def(py::init([](const Plan& plan, bool in_place, const std::string& level_policy,
                       std::optional<MemoryReach> reach, int pieces) {
             return compile(reach ? stage(plan, in_place, *reach, pieces) : plan, in_place,
                            level_policy_of(level_policy));
           }),
           py::arg("plan"), py::arg("in_place"), py::arg("level_policy") = "any",
           py::arg("reach") = py::none(), py::arg("pieces") = 1)
      .def_readonly("plan", &CompiledPlan::plan)
      .def_property_readonly("levels", [](const CompiledPlan& c) { return c.levels.size(); });
  py::class_<MemoryReach>(m, "MemoryReach")
      .def(py::init([](std::vector<bool> on_host, std::vector<std::vector<bool>> directly) {
             return MemoryReach{std::move(on_host), std::move(directly)};
           }),
           py::arg("on_host"), py::arg("directly"));
  m.def("cut_host_memory", &cut_host_memory, py::arg("staged"), py::arg("offsets"));
  m.def("run_plan", &run_plan, py::arg("plan"), py::arg("op"), py::arg("bindings"),
        py::arg("devices"), py::arg("streams"), py::call_guard<py::gil_scoped_release>());
}

using StreamIdsTuple = std::array<int, 3>;  // of a rank: caller, d2h, h2d

cuda::StreamMap stream_map_of(const std::vector<StreamIdsTuple>& stream_ids, int streams) {
  cuda::StreamMap at{{}, streams};
  for (const auto& [caller, d2h, h2d] : stream_ids) at.stream_ids.push_back({caller, d2h, h2d});
  return at;
}

py::list schedule_of(const CompiledPlan& compiled, const std::vector<StreamIdsTuple>& stream_ids,
                     int streams) {
  py::list all;
  for (const auto& launch : cuda::schedule(compiled, stream_map_of(stream_ids, streams))) {
    py::list tasks;
    for (TaskId p : launch.tasks) tasks.append(py::make_tuple(p.rank, p.index));
    all.append(py::make_tuple(launch.stream, tasks, launch.after, launch.recorded));
  }
  return all;
}

double predict_streams(const CompiledPlan& compiled, const std::vector<StreamIdsTuple>& stream_ids,
                       int streams, const std::vector<int>& devices, double bytes,
                       const std::array<double, 5>& model) {
  const auto [alpha, port, memory, bridge, host] = model;
  return predict(compiled, stream_map_of(stream_ids, streams), devices, bytes,
                 {alpha, port, memory, bridge, host});
}

}  // namespace

void bind_plans(py::module_& m) {
  using cuda::Device;
  using cuda::PeerAccessCache;
  bind_compiled(m);
  m.def("schedule", &schedule_of, py::arg("plan"), py::arg("stream_ids"), py::arg("streams"));
  m.def("predict_streams", &predict_streams, py::arg("plan"), py::arg("stream_ids"),
        py::arg("streams"), py::arg("devices"), py::arg("bytes"), py::arg("model"));
  py::class_<PeerAccessCache>(m, "PeerAccessCache")
      .def(py::init([](std::function<bool(Device, Device)> query,
                       std::function<std::string(Device, Device)> test,
                       std::function<void(const std::string&)> warn) {
             return std::make_unique<PeerAccessCache>(
                 PeerAccessCache::Callbacks{std::move(query), std::move(test), std::move(warn)});
           }),
           py::arg("query"), py::arg("test"), py::arg("warn"))
      .def("works",
           [](PeerAccessCache& p, Device from, Device to) { return p.access(from, to).works(); });
}

}  // namespace pycollect
