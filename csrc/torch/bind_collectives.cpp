// Binds the collectives on lists: thin functions that convert Python's arguments, prepare a call
// and run it. pycollect/collectives.py and pycollect/collectives_along_dim.py always pass all
// arguments, so there are no defaults here.
#include "bind_collectives.h"

#include <algorithm>

#include "../plan/error.h"
#include "from_python.h"
#include "gpus.h"
#include "profiler_range.h"
#include "work.h"

namespace pycollect {
namespace {

using Arg = const py::handle&;

// Calls that move at most this many bytes keep the GIL: they end before another thread could take
// it.
constexpr std::size_t kKeepGilBytes = 16 * 1024;

bool peer_access_from(Arg flag, const char* call) { return flag_from(flag, call, "peer_access"); }

// Whether another thread should be able to take the GIL meanwhile: the call moves many bytes, or
// the host waits for a device, because a rank is in host memory.
bool takes_long(const ListCall& call) {
  return call.bytes > kKeepGilBytes || (call.on_gpus() && call.on_host());
}

// `producers`: the streams on which the owners of memory that is not torch's use it.
py::object run_or_enqueue(ListCall call, Producers producers, Arg async_op) {
  call.producers = std::move(producers);
  const bool async = flag_from(async_op, call.name, "async_op");
  call.commit();
  if (async) {
    std::shared_ptr<Work> work;
    {
      std::optional<py::gil_scoped_release> no_gil;
      if (call.on_gpus()) {  // not in the queue of host calls, but behind them
        if (takes_long(call) || busy()) no_gil.emplace();
        drain();
      }
      work = enqueue(std::move(call));
    }
    return py::cast(work);
  }
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (takes_long(call) || busy()) no_gil.emplace();
    drain();
    call.run();
  }
  return call.results.empty() ? py::none() : py::cast(call.results);
}

py::object in_place(InPlaceArgs args, TensorGrid grid, Producers producers, Arg streams,
                    Arg async_op) {
  if (!streams.is_none() && !grid.flat.empty())
    args.streams = streams_from(streams, grid.devices(), args.call);
  return run_or_enqueue(pycollect::in_place(args, std::move(grid)), std::move(producers), async_op);
}

py::object in_place(const InPlaceArgs& args, Arg tensors, Arg async_op, Arg streams) {
  Producers producers;
  Tensors list =
      tensors_from(tensors, [&](int rank) { return access_of(args, rank); }, args.call, producers);
  const int world = static_cast<int>(list.size());
  return in_place(args, {std::move(list), world}, std::move(producers), streams, async_op);
}

py::object coalesced(const InPlaceArgs& args, Arg lists, Arg async_op, Arg streams) {
  Producers producers;
  TensorGrid grid =
      grid_from(lists, [&](int rank) { return access_of(args, rank); }, args.call, producers);
  return in_place(args, std::move(grid), std::move(producers), streams, async_op);
}

py::object all_reduce(Arg tensors, Arg op, Arg algorithm, Arg async_op, Arg streams,
                      Arg peer_access) {
  constexpr const char* kCall = "all_reduce";
  return in_place({.collective = Collective::all_reduce,
                   .call = kCall,
                   .op = op_from(op, kCall),
                   .algorithm = algorithm_from(algorithm, kCall),
                   .peer_access = peer_access_from(peer_access, kCall)},
                  tensors, async_op, streams);
}

py::object all_reduce_coalesced(Arg lists, Arg op, Arg algorithm, Arg async_op, Arg streams,
                                Arg peer_access) {
  constexpr const char* kCall = "all_reduce_coalesced";
  return coalesced({.collective = Collective::all_reduce,
                    .call = kCall,
                    .op = op_from(op, kCall),
                    .algorithm = algorithm_from(algorithm, kCall),
                    .peer_access = peer_access_from(peer_access, kCall)},
                   lists, async_op, streams);
}

py::object reduce(Arg tensors, Arg dst, Arg op, Arg algorithm, Arg async_op, Arg streams,
                  Arg peer_access) {
  constexpr const char* kCall = "reduce";
  return in_place({.collective = Collective::reduce,
                   .call = kCall,
                   .op = op_from(op, kCall),
                   .root = int_from(dst, kCall, "dst"),
                   .algorithm = algorithm_from(algorithm, kCall),
                   .peer_access = peer_access_from(peer_access, kCall)},
                  tensors, async_op, streams);
}

InPlaceArgs broadcast_of(Arg src, Arg algorithm, Arg peer_access, const char* call) {
  return {.collective = Collective::broadcast,
          .call = call,
          .root = int_from(src, call, "src"),
          .root_name = "src",
          .algorithm = algorithm_from(algorithm, call),
          .peer_access = peer_access_from(peer_access, call)};
}
py::object broadcast(Arg tensors, Arg src, Arg algorithm, Arg async_op, Arg streams,
                     Arg peer_access) {
  return in_place(broadcast_of(src, algorithm, peer_access, "broadcast"), tensors, async_op,
                  streams);
}
py::object broadcast_coalesced(Arg lists, Arg src, Arg async_op, Arg streams, Arg peer_access) {
  return coalesced(broadcast_of(src, py::none(), peer_access, "broadcast_coalesced"), lists,
                   async_op, streams);
}

std::optional<Tensors> out_from(Arg out, const char* call, Producers& producers) {
  if (out.is_none()) return std::nullopt;
  return tensors_from(out, write_access, call, producers, "out");
}

py::object run_blocks(BlockArgs args, Arg tensors, Producers& producers, Arg async_op,
                      Arg streams) {
  const char* call = name(args.collective);
  Tensors inputs = tensors_from(tensors, read_access, call, producers);
  DeviceList ranks;
  for (const at::Tensor& t : inputs) ranks.push_back(t.device());
  args.streams = streams_from(streams, ranks, call);
  return run_or_enqueue(block_collective(args, std::move(inputs)), std::move(producers), async_op);
}

py::object all_gather(Arg tensors, Arg dim, Arg algorithm, Arg out, Arg async_op, Arg streams,
                      Arg peer_access) {
  constexpr const char* kCall = "all_gather";
  Producers producers;
  return run_blocks({.collective = Collective::all_gather,
                     .dim = int_from(dim, kCall, "dim"),
                     .algorithm = algorithm_from(algorithm, kCall),
                     .out = out_from(out, kCall, producers),
                     .peer_access = peer_access_from(peer_access, kCall)},
                    tensors, producers, async_op, streams);
}

py::object reduce_scatter(Arg tensors, Arg op, Arg dim, Arg algorithm, Arg out, Arg async_op,
                          Arg streams, Arg peer_access) {
  constexpr const char* kCall = "reduce_scatter";
  Producers producers;
  return run_blocks({.collective = Collective::reduce_scatter,
                     .op = op_from(op, kCall),
                     .dim = int_from(dim, kCall, "dim"),
                     .algorithm = algorithm_from(algorithm, kCall),
                     .out = out_from(out, kCall, producers),
                     .peer_access = peer_access_from(peer_access, kCall)},
                    tensors, producers, async_op, streams);
}

// Converts the block sizes of one rank.
std::vector<int64_t> sizes_from(py::handle sizes, const char* call, const char* name) {
  require_type(PySequence_Check(sizes.ptr()) && !PyUnicode_Check(sizes.ptr()), call, ": ", name,
               " is a ", Py_TYPE(sizes.ptr())->tp_name, "; pass a list of ints");
  std::vector<int64_t> result;
  for (py::handle s : sizes) result.push_back(int_from(s, call, name));
  return result;
}

// Converts one list of sizes for all ranks, or one list per rank.
std::vector<std::vector<int64_t>> split_sizes_from(Arg sizes, const char* call) {
  constexpr const char* kSizes = "split_sizes";
  const bool nested = PySequence_Check(sizes.ptr()) && py::len(sizes) > 0 &&
                      PySequence_Check(sizes[py::int_(0)].ptr());
  if (!nested) return {sizes_from(sizes, call, kSizes)};
  std::vector<std::vector<int64_t>> result;
  for (py::handle s : sizes) result.push_back(sizes_from(s, call, kSizes));
  return result;
}

py::object all_to_all(Arg tensors, Arg dim, Arg split_sizes, Arg out, Arg async_op, Arg streams,
                      Arg peer_access) {
  constexpr const char* kCall = "all_to_all";
  Producers producers;
  BlockArgs args{.collective = Collective::all_to_all,
                 .dim = int_from(dim, kCall, "dim"),
                 .out = out_from(out, kCall, producers),
                 .peer_access = peer_access_from(peer_access, kCall)};
  if (!split_sizes.is_none()) args.sizes = split_sizes_from(split_sizes, kCall);
  return run_blocks(args, tensors, producers, async_op, streams);
}

py::object scatter(Arg tensor, const DeviceList& devices, Arg chunk_sizes, Arg dim, Arg out,
                   Arg async_op, Arg streams, Arg peer_access) {
  constexpr const char* kCall = "scatter";
  Producers producers;
  BlockArgs args{.collective = Collective::scatter,
                 .dim = int_from(dim, kCall, "dim"),
                 .out = out_from(out, kCall, producers),
                 .devices = devices,
                 .peer_access = peer_access_from(peer_access, kCall)};
  if (!chunk_sizes.is_none()) args.sizes = {{sizes_from(chunk_sizes, kCall, "chunk_sizes")}};
  args.streams = streams_from(streams, devices, kCall);
  Tensors input{tensor_from(tensor, AccessMode::read, {kCall, "tensor"}, producers)};
  return run_or_enqueue(block_collective(args, std::move(input)), std::move(producers), async_op);
}

py::object gather(Arg tensors, const DeviceList& device, Arg dim, Arg out, Arg streams,
                  Arg peer_access) {
  constexpr const char* kCall = "gather";
  Producers producers;
  BlockArgs args{.collective = Collective::gather,
                 .dim = int_from(dim, kCall, "dim"),
                 .devices = device,
                 .peer_access = peer_access_from(peer_access, kCall)};
  if (!out.is_none()) args.out = {tensor_from(out, AccessMode::write, {kCall, "out"}, producers)};
  const py::list results = run_blocks(args, tensors, producers, Py_False, streams);
  return results[0];
}

py::object replicate(Arg tensors, const DeviceList& devices, Arg peer_access) {
  constexpr const char* kCall = "replicate";
  Producers producers;
  Tensors list = tensors_from(tensors, read_access, kCall, producers);
  return run_or_enqueue(
      pycollect::replicate(std::move(list), devices, peer_access_from(peer_access, kCall)),
      std::move(producers), Py_False);
}

py::object copy(Arg dst, Arg src, Arg async_op, Arg peer_access) {
  constexpr const char* kCall = "copy_";
  Producers producers;
  const at::Tensor to = tensor_from(dst, AccessMode::write, {kCall, "dst"}, producers);
  const at::Tensor from = tensor_from(src, AccessMode::read, {kCall, "src"}, producers);
  return run_or_enqueue(pycollect::copy(to, from, peer_access_from(peer_access, kCall)),
                        std::move(producers), async_op);
}

void bind_all(py::module_& m) {
  m.def("all_reduce", &all_reduce);
  m.def("all_reduce_coalesced", &all_reduce_coalesced);
  m.def("reduce", &reduce);
  m.def("broadcast", &broadcast);
  m.def("broadcast_coalesced", &broadcast_coalesced);
  m.def("all_gather", &all_gather);
  m.def("reduce_scatter", &reduce_scatter);
  m.def("all_to_all", &all_to_all);
  m.def("scatter", &scatter);
  m.def("gather", &gather);
  m.def("replicate", &replicate);
  m.def("copy_", &copy);
  m.def(
      "drain",
      [] {
        const ProfilerRange range("barrier");
        drain();
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_collectives(py::module_& m) { bind_all(m); }

}  // namespace pycollect
