// Binds the emulated GPUs, and the collectives on lists, which accept their tensors.
#include "../../torch/bind_collectives.h"
#include "../../torch/gpus.h"
#include "bind.h"
#include "emulated_gpus.h"

namespace pycollect {

void bind_gpus(py::module_& m) {
  auto collectives = m.def_submodule("collectives", "The collectives, on emulated GPUs, too.");
  bind_collectives(collectives);
  py::class_<EmulatedGpus, std::shared_ptr<EmulatedGpus>>(m, "EmulatedGpus")
      .def(py::init([](int devices) {
             auto gpus = std::make_shared<EmulatedGpus>(devices);
             set_runtime(EmulatedGpus::kKind, gpus);
             return gpus;
           }),
           py::arg("devices"))
      .def("close", [](EmulatedGpus&) { set_runtime(EmulatedGpus::kKind, nullptr); })
      .def_property_readonly("cuda", &EmulatedGpus::emulator)
      .def(
          "empty",
          [](EmulatedGpus& gpus, const std::vector<int64_t>& sizes, c10::DeviceIndex device) {
            return gpus.empty(sizes, at::kFloat, {EmulatedGpus::kKind, device});
          },
          py::arg("sizes"), py::arg("device"))
      .def("current",
           [](EmulatedGpus& gpus, c10::DeviceIndex device) {
             return gpus.current_stream({EmulatedGpus::kKind, device});
           })
      .def("use", &EmulatedGpus::use, py::arg("stream"))
      .def("connect", &EmulatedGpus::connect, py::arg("on"))
      .def("write", &EmulatedGpus::write, py::arg("tensor"), py::arg("values"))
      .def("read", &EmulatedGpus::read, py::arg("tensor"))
      .def("adopt", &EmulatedGpus::adopt, py::arg("tensor"), py::arg("pinned"))
      .def("foreign", &EmulatedGpus::foreign, py::arg("count"), py::arg("device"),
           py::arg("offset") = 0)
      .def("begin_capture", &EmulatedGpus::begin_capture, py::arg("stream"),
           py::arg("by_torch") = true)
      .def("end_capture", &EmulatedGpus::end_capture, py::arg("stream"))
      .def("run", &EmulatedGpus::run, py::arg("seed"))
      .def("recorded", &EmulatedGpus::recorded)
      .def("blocks_in_use", &EmulatedGpus::blocks_in_use);
}

}  // namespace pycollect
