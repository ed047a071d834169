#include "bind_probe.h"

#include <algorithm>
#include <chrono>

#include "../plan/error.h"
#include "../shm/outlet.h"
#include "collectives.h"
#include "convert.h"
#include "host_copy.h"
#include "threads.h"

namespace pycollect {
namespace {

using Buffers =
    std::vector<std::vector<std::optional<at::Tensor>>>;  // [rank][input, output, scratch, host]

// Runs `plan` on contiguous tensors of one length, in the written order (the specification) or by
// levels.
void run_plan(const Plan& plan, const Buffers& buffers, const std::string& op, bool in_place,
              bool by_levels) {
  const at::Tensor& first = *buffers.at(0).at(0);
  const Compiled compiled = compile(plan, in_place);
  const Offsets offsets(plan, {static_cast<std::size_t>(first.numel())});
  std::vector<Binding> bindings{{&offsets, std::vector<Memory>(plan.world * kBuffers)}};
  for (Rank r = 0; r < plan.world; ++r)
    for (int b = 0; b < std::min<int>(kBuffers, buffers.at(r).size()); ++b)
      if (const auto& t = buffers[r][in_place && b == 1 ? 0 : b]) {
        require(t->is_contiguous() && t->numel() == first.numel() && t->dtype() == first.dtype(),
                "run_plan: buffers must be contiguous and alike");
        bindings[0].memory[r * kBuffers + b].base = static_cast<std::byte*>(t->mutable_data_ptr());
      }
  const Call call{compiled,
                  bindings,
                  dtype_of(first, {"run_plan", "buffers"}),
                  op_named(op, "run_plan"),
                  {.world = plan.world, .float8 = float8_rounding()}};
  if (by_levels)
    cpu::run(call, threads());
  else
    cpu::run_in_order(call);
}

// Seconds of each of `iterations` runs of one bound all_reduce, without Python and argument checks.
std::vector<double> time_all_reduce(const py::object& tensors, const py::object& op,
                                    const py::object& algorithm, int iterations) {
  constexpr const char* kCall = "time_all_reduce";
  Tensors list = tensors_from(tensors, written, kCall);
  const int world = static_cast<int>(list.size());
  const Job job = in_place({.collective = Collective::all_reduce,
                            .call = kCall,
                            .op = op_from(op, kCall),
                            .algorithm = algorithm_from(algorithm, kCall)},
                           {std::move(list), world});
  const py::gil_scoped_release free;
  std::vector<double> seconds;
  for (int i = 0; i < iterations; ++i) {
    const auto start = std::chrono::steady_clock::now();
    job.run();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

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
  m.def("run_plan", &run_plan, py::arg("plan"), py::arg("buffers"), py::arg("op"),
        py::arg("in_place"), py::arg("by_levels"));
  m.def("copy_rows", &copy_rows, py::arg("dst"), py::arg("src"), py::arg("bytes"), py::arg("rows"),
        py::arg("pitches"));
  bind_outlet(m);
  m.def("time_all_reduce", &time_all_reduce, py::arg("tensors"), py::arg("op"),
        py::arg("algorithm"), py::arg("iterations"));
}

}  // namespace pycollect
