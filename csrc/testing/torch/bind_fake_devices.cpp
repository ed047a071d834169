// They come into a group with its options.
#include "../../torch/c10d/options.h"
#include "bind.h"
#include "fake_devices.h"

namespace pycollect {
namespace {

using dist::FakeDevices;
using dist::FakeGpu;
using dist::Options;

std::shared_ptr<FakeDevices> fake_devices(const c10::intrusive_ptr<Options>& options, bool eager,
                                          bool slabs) {
  auto made = std::make_shared<FakeDevices>(eager, slabs);
  options->devices = made;
  return made;
}

}  // namespace

void bind_fake_devices(py::module_& m) {
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<FakeDevices, std::shared_ptr<FakeDevices>>(m, "FakeDevices")
      .def("put_on_host", &FakeDevices::put_on_host, py::arg("tensor"), free)
      .def("fill_later", &FakeDevices::fill_later, py::arg("tensor"), py::arg("value"), free)
      .def("use_second_stream", &FakeDevices::use_second_stream, py::arg("on"), free)
      .def("finish_caller", &FakeDevices::finish_caller, free)
      .def("stall", &FakeDevices::stall, py::arg("on"), py::arg("after") = 0, free)
      .def("capture", &FakeDevices::capture, py::arg("on"), free)
      .def("fail_call", &FakeDevices::fail_call, py::arg("in_"), free)
      .def("look", &FakeDevices::look, py::arg("on"), free)
      .def("pinned", &FakeDevices::pinned, free)
      .def("trace", &FakeDevices::trace, free)
      .def_property_readonly("gpu", &FakeDevices::slabs);
  py::class_<FakeGpu, std::shared_ptr<FakeGpu>>(m, "FakeGpu")
      .def("fail", &FakeGpu::fail, py::arg("call"), py::arg("in_") = 0, free)
      .def("drop", &FakeGpu::drop, py::arg("call"), py::arg("on") = true, free)
      .def("live_on", &FakeGpu::live_on, py::arg("gpu"), free)
      .def("pace", &FakeGpu::pace, py::arg("seconds"), free)
      .def("books", &FakeGpu::books, free)
      .def("fouls", &FakeGpu::fouls, free);
  m.def("fake_devices", &fake_devices, py::arg("options"), py::arg("eager") = false,
        py::arg("slabs") = false);
}

}  // namespace pycollect
