// Binds the CUDA emulator with its single calls, and the emulated torch runtime, which `emulate`
// sets in a group's options. Streams and events are opaque; addresses are integers.
#include <pybind11/functional.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <array>

#include "../../plan/find_name.h"
#include "../../torch/c10d/options.h"
#include "bind.h"
#include "emulated_torch.h"

namespace pycollect {
namespace cuda {
namespace {

using WorkTuple = std::tuple<std::vector<uintptr_t>, std::vector<uintptr_t>, std::size_t>;
const auto kFree = py::call_guard<py::gil_scoped_release>();

Launch launch_of(const std::vector<WorkTuple>& works) {
  auto pointers = [](const std::vector<uintptr_t>& at) {
    std::vector<std::byte*> all;
    for (uintptr_t p : at) all.push_back(reinterpret_cast<std::byte*>(p));
    return all;
  };
  Launch launch{{}, DType::u8, ReduceOp::sum, {}};
  for (const auto& [dsts, srcs, count] : works)
    launch.works.push_back({pointers(dsts), pointers(srcs),
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

void bind_api(py::module_& m) {
  py::class_<Stream>(m, "Stream")
      .def_readonly("device", &Stream::device)
      .def(py::self == py::self)
      .def_property_readonly("device_index", [](const Stream& s) { return s.device; })
      .def_property_readonly("stream_id",
                             [](const Stream& s) { return reinterpret_cast<uintptr_t>(s.handle); });
  py::class_<Event>(m, "Event").def_readonly("device", &Event::device);
  py::class_<Emulator, std::shared_ptr<Emulator>>(m, "Emulator")
      .def(py::init(&Emulator::recording), py::arg("devices"))
      .def("set_device", &Emulator::set_device)
      .def("current_device", &Emulator::current_device)
      .def("stream", &Emulator::create_stream, py::arg("device"))
      .def("default_stream", [](const Emulator&, Device device) { return Stream{device}; })
      .def("event", &Emulator::create_event, py::arg("device"))
      .def("destroy", py::overload_cast<Event>(&Emulator::destroy))
      .def("record", &Emulator::record)
      .def("wait", &Emulator::wait)
      .def("connect", &Emulator::connect, py::arg("device"), py::arg("of"))
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
                        const std::vector<WorkTuple>& works) { c.launch(s, launch_of(works)); })
      .def("copy", &copy_bytes, py::arg("stream"), py::arg("dst"), py::arg("src"), py::arg("bytes"))
      .def("capture_id", &Emulator::capture_id)
      .def("synchronize", py::overload_cast<Stream>(&Emulator::synchronize))
      .def("begin_capture", &Emulator::begin_capture)
      .def("end_capture", &Emulator::end_capture)
      .def("at_graph_end", &Emulator::at_graph_end)
      .def("destroy_graph", &Emulator::destroy_graph, py::arg("capture"))
      .def("allow_eager_work", &Emulator::allow_eager_work, py::arg("on"))
      .def_property_readonly(
          "race", [](const Emulator& c) { return words(TraceRaceDetector(c.trace()).race()); })
      .def("fail", &Emulator::fail, py::arg("call"), py::arg("after") = 0, kFree)
      .def("kill", &Emulator::kill, py::arg("call"), py::arg("after") = 0, kFree)
      .def("delay", &Emulator::delay, py::arg("call"), py::arg("seconds"), kFree)
      .def("drop", &Emulator::drop, py::arg("call"), py::arg("on") = true, kFree)
      .def("block", &Emulator::block, py::arg("call"), py::arg("on") = true, kFree)
      .def("report_device", &Emulator::report_device, py::arg("device"))
      .def("set_pause", &Emulator::set_pause, py::arg("seconds"), kFree)
      .def("counters", &Emulator::counters, kFree)
      .def("violations", &Emulator::violations, kFree);
}

}  // namespace
}  // namespace cuda

namespace {

using dist::EmulatedTorch;
using dist::Options;

std::shared_ptr<EmulatedTorch> emulate(const c10::intrusive_ptr<Options>& options, bool eager,
                                       bool own_thread) {
  auto made = std::make_shared<EmulatedTorch>(eager, own_thread);
  options->torch = made;
  return made;
}

void bind_torch(py::module_& m) {
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<EmulatedTorch, std::shared_ptr<EmulatedTorch>>(m, "EmulatedTorch")
      .def(
          "empty",
          [](EmulatedTorch& torch, int64_t count) {
            return torch.empty({count}, at::kFloat, at::kCPU);
          },
          py::arg("count"), free)
      .def("empty_foreign", &EmulatedTorch::empty_foreign, py::arg("count"), free)
      .def("put_on_host", &EmulatedTorch::put_on_host, py::arg("tensor"), free)
      .def("fill_later", &EmulatedTorch::fill_later, py::arg("tensor"), py::arg("value"), free)
      .def("use_second_stream", &EmulatedTorch::use_second_stream, py::arg("on"), free)
      .def("use_own_stream", &EmulatedTorch::use_own_stream, free)
      .def("finish_own_stream", &EmulatedTorch::finish_own_stream, free)
      .def("finish_caller", &EmulatedTorch::finish_caller, free)
      .def("stall", &EmulatedTorch::stall, py::arg("on"), py::arg("after") = 0, free)
      .def("capture", &EmulatedTorch::capture, py::arg("on"), free)
      .def(
          "fail_call", [](EmulatedTorch& torch, int after) { torch.emulator()->fail_call(after); },
          py::arg("after"), free)
      .def(
          "drain_waits", [](EmulatedTorch& torch, bool on) { torch.emulator()->drain_waits(on); },
          py::arg("on"), free)
      .def("pinned", &EmulatedTorch::pinned, free)
      .def(
          "calls", [](EmulatedTorch& torch) { return torch.emulator()->calls(); }, free)
      .def_property_readonly("gpu", &EmulatedTorch::emulator);
  m.def("emulate", &emulate, py::arg("options"), py::arg("eager") = false,
        py::arg("own_thread") = false);
}

}  // namespace

void bind_emulator(py::module_& m) {
  cuda::bind_api(m);
  bind_torch(m);
}

}  // namespace pycollect
