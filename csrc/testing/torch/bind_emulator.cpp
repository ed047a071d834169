// Binds the CUDA emulator with its single calls; the emulated torch runtime, which `emulate` sets
// in a group's options; and the collectives on lists, which accept its tensors. Streams and events
// are opaque; addresses are integers.
#include <pybind11/functional.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <array>

#include "../../plan/error.h"
#include "../../torch/bindings.h"
#include "../../torch/c10d/rank_communicator.h"
#include "../../torch/gpus.h"
#include "bind.h"
#include "emulated_torch.h"

namespace pycollect {
namespace cuda {
namespace {

using FlatTask = std::tuple<std::vector<uintptr_t>, std::vector<uintptr_t>, std::size_t>;
const auto kFree = py::call_guard<py::gil_scoped_release>();

Launch launch_of(const std::vector<FlatTask>& tasks) {
  auto pointers = [](const std::vector<uintptr_t>& at) {
    std::vector<std::byte*> all;
    for (uintptr_t p : at) all.push_back(reinterpret_cast<std::byte*>(p));
    return all;
  };
  Launch launch{{}, DType::u8, ReduceOp::sum, {}};
  for (const auto& [dsts, srcs, count] : tasks)
    launch.tasks.push_back({pointers(dsts), pointers(srcs),
                            std::vector<std::ptrdiff_t>(dsts.size()),
                            std::vector<std::ptrdiff_t>(srcs.size()), count});
  return launch;
}

void copy_bytes(Emulator& cuda, Stream stream, std::pair<uintptr_t, Device> dst,
                std::pair<uintptr_t, Device> src, std::size_t bytes) {
  cuda.copy(stream, {.dst = reinterpret_cast<std::byte*>(dst.first),
                     .src = reinterpret_cast<const std::byte*>(src.first),
                     .dst_pitch = 0,
                     .src_pitch = 0,
                     .bytes = bytes,
                     .rows = 1,
                     .dst_device = dst.second,
                     .src_device = src.second});
}

void inject(Emulator& cuda, const std::string& kind, const std::string& call, int after,
            double seconds) {
  const auto k = find_name("kind", kind, std::array{"fail", "skip", "slow", "lost"});
  cuda.inject(Fault{static_cast<FaultKind>(k), call, after, seconds});
}

void set_order(Emulator& cuda, const std::string& order, std::uint64_t seed) {
  const auto o = find_name("order", order, std::array{"late", "eager", "as_issued", "random"});
  cuda.streams().set_order(static_cast<WorkOrder>(o), seed);
}

void bind_api(py::module_& m) {
  py::class_<Stream>(m, "Stream")
      .def_readonly("device", &Stream::device)
      .def(py::self == py::self)
      .def_property_readonly("device_index", [](const Stream& s) { return s.device; })
      .def_property_readonly("stream_id",
                             [](const Stream& s) { return reinterpret_cast<uintptr_t>(s.handle); });
  py::class_<Event>(m, "Event").def_readonly("device", &Event::device);
  py::class_<Emulator, std::shared_ptr<Emulator>>(m, "Emulator")
      .def(py::init([](int devices) { return std::make_shared<Emulator>(devices); }),
           py::arg("devices"))
      .def("set_device", &Emulator::set_device)
      .def("current_device", &Emulator::current_device)
      .def("stream", py::overload_cast<Device, bool>(&Emulator::create_stream), py::arg("device"),
           py::arg("of_caller") = true, kFree)
      .def("default_stream", [](const Emulator&, Device device) { return Stream{device}; })
      .def("event", &Emulator::create_event, py::arg("device"), kFree)
      .def("destroy", py::overload_cast<Event>(&Emulator::destroy))
      .def("record", &Emulator::record, kFree)
      .def("wait", &Emulator::wait, kFree)
      .def("connect", &Emulator::connect, py::arg("device"), py::arg("of"), py::arg("on") = true)
      .def(
          "allocate",
          [](Emulator& c, const std::string& kind, Device device, std::size_t bytes) {
            constexpr std::array kKinds{"device", "pinned", "pageable"};
            const auto k = find_name("kind", kind, kKinds);
            return reinterpret_cast<uintptr_t>(
                c.allocate(static_cast<MemoryKind>(k), device, bytes));
          },
          py::arg("kind"), py::arg("device"), py::arg("bytes"))
      .def("launch", [](Emulator& c, Stream s,
                        const std::vector<FlatTask>& tasks) { c.launch(s, launch_of(tasks)); })
      .def("copy", &copy_bytes, py::arg("stream"), py::arg("dst"), py::arg("src"), py::arg("bytes"))
      .def("capture_id", &Emulator::capture_id, kFree)
      .def("synchronize", py::overload_cast<Stream>(&Emulator::synchronize), kFree)
      .def("finish", &Emulator::finish, kFree)
      .def("begin_capture", &Emulator::begin_capture, kFree)
      .def("end_capture", &Emulator::end_capture, kFree)
      .def("at_graph_end", &Emulator::at_graph_end)
      .def("destroy_graph", &Emulator::destroy_graph, py::arg("capture"))
      .def("allow_eager_work", &Emulator::allow_eager_work, py::arg("on"))
      .def_property_readonly("race",
                             [](const Emulator& c) {
                               std::string found;
                               {
                                 const py::gil_scoped_release free;
                                 found = c.race();
                               }
                               return words(found);
                             })
      .def("redundant_waits", &Emulator::redundant_waits, kFree)
      .def(
          "set_ring",
          [](Emulator& c, std::size_t bytes, int pieces) { c.set_ring_size({bytes, pieces}); },
          py::arg("bytes"), py::arg("pieces"))
      .def("inject", &inject, py::arg("kind"), py::arg("call") = "", py::arg("after") = 0,
           py::arg("seconds") = 0.0, kFree)
      .def(
          "heal", [](Emulator& c) { c.inject({}); }, kFree)
      .def("set_order", &set_order, py::arg("order"), py::arg("seed") = 1, kFree)
      .def("report_device", &Emulator::report_device, py::arg("device"))
      .def(
          "set_pause", [](Emulator& c, double seconds) { c.streams().pause_for(seconds); },
          py::arg("seconds"), kFree)
      .def("drain_waits", &Emulator::drain_waits, py::arg("on"), kFree)
      .def("calls", &Emulator::calls, kFree)
      .def("counters", &Emulator::counters, kFree)
      .def("violations", &Emulator::violations, kFree);
}

}  // namespace
}  // namespace cuda

namespace {

std::shared_ptr<EmulatedTorch> emulate(const c10::intrusive_ptr<dist::Options>& options, bool eager,
                                       bool own_thread) {
  auto made = std::make_shared<EmulatedTorch>(c10::DeviceType::CPU, 1);
  if (eager) made->emulator()->streams().set_order(cuda::WorkOrder::eager);
  if (own_thread) made->emulator()->streams().start_thread();
  options->torch = made;
  return made;
}

at::Tensor empty_on(EmulatedTorch& torch, const std::vector<int64_t>& sizes,
                    c10::DeviceIndex device) {
  const bool indexed = torch.has({EmulatedTorch::kLists, device});
  return torch.empty(sizes, at::kFloat,
                     indexed ? at::Device(EmulatedTorch::kLists, device) : at::kCPU);
}

cuda::Stream current_on(EmulatedTorch& torch, c10::DeviceIndex device) {
  return torch.current_stream({EmulatedTorch::kLists, device});
}

void bind_torch(py::module_& m) {
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<EmulatedTorch, std::shared_ptr<EmulatedTorch>>(m, "EmulatedTorch")
      .def(py::init([](int devices) {
             auto made = std::make_shared<EmulatedTorch>(EmulatedTorch::kLists, devices);
             set_runtime(EmulatedTorch::kLists, made);
             return made;
           }),
           py::arg("devices"))
      .def("close", [](EmulatedTorch&) { set_runtime(EmulatedTorch::kLists, nullptr); })
      .def_property_readonly("cuda", &EmulatedTorch::emulator)
      .def("empty", &empty_on, py::arg("sizes"), py::arg("device") = 0, free)
      .def(
          "empty_pinned",
          [](EmulatedTorch& torch, const std::vector<int64_t>& sizes) {
            return torch.empty_pinned(sizes, at::kFloat);
          },
          py::arg("sizes"), free)
      .def("empty_foreign", &EmulatedTorch::empty_foreign, py::arg("count"), py::arg("device") = 0,
           py::arg("offset") = 0, free)
      .def("adopt", &EmulatedTorch::adopt, py::arg("tensor"), py::arg("pinned"), free)
      .def("put_on_host", &EmulatedTorch::put_on_host, py::arg("tensor"), free)
      .def("connect", &EmulatedTorch::connect, py::arg("on"))
      .def("current", &current_on, py::arg("device") = 0, free)
      .def("use", &EmulatedTorch::use, py::arg("stream"), free)
      .def("use_own_stream", &EmulatedTorch::use_own_stream, free)
      .def("write", &EmulatedTorch::write, py::arg("tensor"), py::arg("values"),
           py::arg("stream") = py::none(), free)
      .def("read", &EmulatedTorch::read, py::arg("tensor"), py::arg("stream") = py::none(), free)
      .def("finish", &EmulatedTorch::finish, free)
      .def("stall", &EmulatedTorch::stall, py::arg("stream"), free)
      .def("resume", &EmulatedTorch::resume, free)
      .def("begin_capture", &EmulatedTorch::begin_capture, py::arg("stream"),
           py::arg("by_torch") = true, free)
      .def("end_capture", &EmulatedTorch::end_capture, py::arg("stream"), free)
      .def("run", &EmulatedTorch::run, py::arg("seed"), free)
      .def("recorded", &EmulatedTorch::recorded)
      .def("blocks_in_use", &EmulatedTorch::blocks_in_use);
  m.def("emulate", &emulate, py::arg("options"), py::arg("eager") = false,
        py::arg("own_thread") = false);
}

}  // namespace

void bind_emulator(py::module_& m) {
  cuda::bind_api(m);
  bind_torch(m);
  auto collectives = m.def_submodule("collectives", "The collectives, on emulated GPUs, too.");
  bind_collectives(collectives);
}

}  // namespace pycollect
