// Binds the backend of torch.distributed and its options to Python. The backend class itself is not
// bound: Python has it as torch's Backend.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include "../plan/error.h"
#include "bindings.h"
#include "c10d/backend.h"

namespace pycollect {
namespace {

using dist::Options;

// Returns the backend when all ranks have joined. Called without the GIL, because a store may be
// written in Python.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int world,
                                               const c10::intrusive_ptr<Options>& options) {
  return c10::make_intrusive<dist::Backend>(store, dist::RankAndWorld{rank, world}, options);
}

// Returns bytes of the symmetric heap: in tensors, free but cached, and reserved as address space.
// None for another backend.
std::optional<std::tuple<std::size_t, std::size_t, std::size_t>> symmetric_heap_usage(
    const c10::intrusive_ptr<c10d::Backend>& backend) {
  const auto* own = dynamic_cast<const dist::Backend*>(backend.get());
  if (own == nullptr) return std::nullopt;
  const ipc::SymmetricHeap::HeapUsage use = own->allocator()->usage();
  return std::tuple(use.used, use.cached, use.reserved);
}

bool is_backend(const c10::intrusive_ptr<c10d::Backend>& backend) {
  return dynamic_cast<dist::Backend*>(backend.get()) != nullptr;
}

void abandon_coalescing(const c10::intrusive_ptr<c10d::Backend>& backend, const std::string& why,
                        bool unlisted) {
  dynamic_cast<dist::Backend&>(*backend).abandonCoalescing(why, unlisted);
}

c10::intrusive_ptr<Options> copy_of(const Options& options) {
  return c10::make_intrusive<Options>(options);
}

}  // namespace

void bind_distributed(py::module_& m) {
  const auto torch = py::module_::import("torch.distributed");  // binds the base class
  if (!torch.attr("is_available")().cast<bool>()) return;
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(m, "Options")
      .def(py::init<>())
      .def_readwrite("algorithm", &Options::algorithm)
      .def_readwrite("order", &Options::order)
      .def_readwrite("hosts", &Options::hosts)
      .def_readwrite("_gloo", &Options::gloo)
      .def_readwrite("_version", &Options::version)
      .def_readwrite("_is_default", &Options::is_default)
      .def_readwrite("buffer_bytes", &Options::buffer_bytes)
      .def_readwrite("symmetric_heap_bytes", &Options::symmetric_heap_bytes)
      .def("__copy__", &copy_of)
      .def("__deepcopy__", [](const Options& o, const py::dict&) { return copy_of(o); });
  m.def("make_backend", &make_backend, py::arg("store"), py::arg("rank"), py::arg("world"),
        py::arg("options"), py::call_guard<py::gil_scoped_release>());
  m.def("symmetric_heap_usage", &symmetric_heap_usage);
  m.def("is_backend", &is_backend);
  m.def("abandon_coalescing", &abandon_coalescing, py::arg("backend"), py::arg("why"),
        py::arg("unlisted"), py::call_guard<py::gil_scoped_release>());
  m.def("close_groups", &dist::close_groups, py::call_guard<py::gil_scoped_release>());
}

}  // namespace pycollect
