// Binds copies by the host, and the fd server.
#include "../../bootstrap/fd_server.h"
#include "../../cuda/api.h"
#include "../../torch/host_copy.h"
#include "bind.h"

namespace pycollect {
namespace {

// Copies rows of `bytes` bytes between two tensors. `pitches`: bytes from one row to the next, in
// `dst` and in `src`.
void copy_rows(const at::Tensor& dst, const at::Tensor& src, std::size_t bytes, std::size_t rows,
               std::pair<std::ptrdiff_t, std::ptrdiff_t> pitches) {
  copy_on_host({static_cast<std::byte*>(dst.mutable_data_ptr()),
                static_cast<const std::byte*>(src.const_data_ptr()), pitches.first, pitches.second,
                bytes, rows, cuda::kHost, cuda::kHost});
}

// FdServer::FdTicket as two numbers.
using TicketTuple = std::pair<uint64_t, uint64_t>;

int fetch_descriptor(const TicketTuple& ticket) {
  return ipc::fetch({ticket.first, ticket.second}).release();
}

void bind_fd_server(py::module_& m) {
  using ipc::FdServer;
  const auto free = py::call_guard<py::gil_scoped_release>();
  py::class_<FdServer>(m, "FdServer")
      .def(py::init<>())
      .def(
          "offer",  // takes ownership of the descriptor
          [](FdServer& fd_server, int descriptor) {
            const auto [name, number] = fd_server.offer(ipc::UniqueFd(descriptor));
            return TicketTuple{name, number};
          },
          py::arg("descriptor"), free);
  m.def("fetch_descriptor", &fetch_descriptor, py::arg("ticket"), free);
}

}  // namespace

void bind_probe(py::module_& m) {
  m.def("copy_rows", &copy_rows, py::arg("dst"), py::arg("src"), py::arg("bytes"), py::arg("rows"),
        py::arg("pitches"));
  bind_fd_server(m);
}

}  // namespace pycollect
