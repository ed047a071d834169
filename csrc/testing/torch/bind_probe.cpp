#include "../../cuda/api.h"
#include "../../shm/outlet.h"
#include "../../torch/host_copy.h"
#include "bind.h"

namespace pycollect {
namespace {

// Rows of bytes, `pitches` apart, from one tensor's memory into another's.
void copy_rows(const at::Tensor& dst, const at::Tensor& src, std::size_t bytes, std::size_t rows,
               std::pair<std::ptrdiff_t, std::ptrdiff_t> pitches) {
  copy_on_host({static_cast<std::byte*>(dst.mutable_data_ptr()),
                static_cast<const std::byte*>(src.const_data_ptr()), pitches.first, pitches.second,
                bytes, rows, cuda::kHost, cuda::kHost});
}

// A ticket as two numbers.
using Ticket = std::pair<uint64_t, uint64_t>;

int fetch_descriptor(const Ticket& ticket) {
  return shm::fetch({ticket.first, ticket.second}).release();
}

void bind_outlet(py::module_& m) {
  using shm::Outlet;
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<Outlet>(m, "Outlet")
      .def(py::init<>())
      .def(
          "offer",  // from then on the descriptor is the outlet's
          [](Outlet& outlet, int descriptor) {
            const auto [name, number] = outlet.offer(shm::Descriptor(descriptor));
            return Ticket{name, number};
          },
          py::arg("descriptor"), free)
      .def(
          "withdraw",
          [](Outlet& outlet, const Ticket& ticket) {
            outlet.withdraw({ticket.first, ticket.second});
          },
          py::arg("ticket"), free);
  m.def("fetch_descriptor", &fetch_descriptor, py::arg("ticket"), free);
}

}  // namespace

void bind_probe(py::module_& m) {
  m.def("copy_rows", &copy_rows, py::arg("dst"), py::arg("src"), py::arg("bytes"), py::arg("rows"),
        py::arg("pitches"));
  bind_outlet(m);
}

}  // namespace pycollect
