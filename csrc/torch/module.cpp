// The module pycollect._C: thin functions that convert Python's arguments, prepare a call and run
// it. pycollect/collectives.py and pycollect/collectives_along_dim.py always pass all arguments, so
// there are no defaults here.
#include "../plan/error.h"
#include "bind_distributed.h"
#include "bind_machine.h"
#include "bind_plan.h"
#include "bind_threads.h"
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

py::object as_list(const Tensors& tensors) { return py::cast(tensors); }

py::object run_or_enqueue(PreparedCall prepared, Arg async_op) {
  const bool async = flag_from(async_op, prepared.call, "async_op");
  prepared.commit();
  if (async) {
    std::shared_ptr<Work> work;
    {
      // Enqueuing on GPUs may have to wait for copies of pageable host memory.
      std::optional<py::gil_scoped_release> no_gil;
      if (prepared.on_gpus() && prepared.bytes > kKeepGilBytes) no_gil.emplace();
      work = enqueue(std::move(prepared));
    }
    return py::cast(work);
  }
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (prepared.bytes > kKeepGilBytes || busy()) no_gil.emplace();
    drain();
    prepared.run();
  }
  return prepared.results.empty() ? py::none() : as_list(prepared.results);
}

py::object run_or_enqueue(PreparedCall prepared, Arg async_op, Arg streams, const char* call) {
  const bool has_tensors = !prepared.devices.empty();  // false for lists without tensors
  if (!streams.is_none() && has_tensors)
    prepared.streams = streams_from(streams, prepared.devices, call);
  return run_or_enqueue(std::move(prepared), async_op);
}

py::object in_place(const InPlaceArgs& args, py::handle tensors, Arg async_op, py::handle streams) {
  Tensors list = tensors_from(tensors, [&](int rank) { return access_of(args, rank); }, args.call);
  const int world = static_cast<int>(list.size());
  return run_or_enqueue(pycollect::in_place(args, {std::move(list), world}), async_op, streams,
                        args.call);
}

py::object coalesced(const InPlaceArgs& args, py::handle lists, Arg async_op, py::handle streams) {
  TensorGrid grid = grid_from(lists, [&](int rank) { return access_of(args, rank); }, args.call);
  return run_or_enqueue(pycollect::in_place(args, std::move(grid)), async_op, streams, args.call);
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

std::optional<Tensors> out_from(Arg out, const char* call) {
  if (out.is_none()) return std::nullopt;
  return tensors_from(out, write_access, call, "out");
}

py::object run_blocks(BlockArgs args, Arg tensors, Arg async_op, Arg streams) {
  const char* call = name(args.collective);
  Tensors inputs = tensors_from(tensors, read_access, call);
  DeviceList ranks;
  for (const at::Tensor& t : inputs) ranks.push_back(t.device());
  args.streams = streams_from(streams, ranks, call);
  return run_or_enqueue(block_collective(args, std::move(inputs)), async_op);
}

py::object all_gather(Arg tensors, Arg dim, Arg algorithm, Arg out, Arg async_op, Arg streams,
                      Arg peer_access) {
  constexpr const char* kCall = "all_gather";
  return run_blocks({.collective = Collective::all_gather,
                     .dim = int_from(dim, kCall, "dim"),
                     .algorithm = algorithm_from(algorithm, kCall),
                     .out = out_from(out, kCall),
                     .peer_access = peer_access_from(peer_access, kCall)},
                    tensors, async_op, streams);
}

py::object reduce_scatter(Arg tensors, Arg op, Arg dim, Arg algorithm, Arg out, Arg async_op,
                          Arg streams, Arg peer_access) {
  constexpr const char* kCall = "reduce_scatter";
  return run_blocks({.collective = Collective::reduce_scatter,
                     .op = op_from(op, kCall),
                     .dim = int_from(dim, kCall, "dim"),
                     .algorithm = algorithm_from(algorithm, kCall),
                     .out = out_from(out, kCall),
                     .peer_access = peer_access_from(peer_access, kCall)},
                    tensors, async_op, streams);
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
  BlockArgs args{.collective = Collective::all_to_all,
                 .dim = int_from(dim, kCall, "dim"),
                 .out = out_from(out, kCall),
                 .peer_access = peer_access_from(peer_access, kCall)};
  if (!split_sizes.is_none()) args.sizes = split_sizes_from(split_sizes, kCall);
  return run_blocks(args, tensors, async_op, streams);
}

py::object scatter(Arg tensor, const DeviceList& devices, Arg chunk_sizes, Arg dim, Arg out,
                   Arg async_op, Arg streams, Arg peer_access) {
  constexpr const char* kCall = "scatter";
  BlockArgs args{.collective = Collective::scatter,
                 .dim = int_from(dim, kCall, "dim"),
                 .out = out_from(out, kCall),
                 .devices = devices,
                 .peer_access = peer_access_from(peer_access, kCall)};
  if (!chunk_sizes.is_none()) args.sizes = {{sizes_from(chunk_sizes, kCall, "chunk_sizes")}};
  args.streams = streams_from(streams, devices, kCall);
  return run_or_enqueue(
      block_collective(args, {tensor_from(tensor, AccessMode::read, {kCall, "tensor"})}), async_op);
}

py::object gather(Arg tensors, const DeviceList& device, Arg dim, Arg out, Arg streams,
                  Arg peer_access) {
  constexpr const char* kCall = "gather";
  BlockArgs args{.collective = Collective::gather,
                 .dim = int_from(dim, kCall, "dim"),
                 .devices = device,
                 .peer_access = peer_access_from(peer_access, kCall)};
  if (!out.is_none()) args.out = {tensor_from(out, AccessMode::write, {kCall, "out"})};
  const py::list results = run_blocks(args, tensors, Py_False, streams);
  return results[0];
}

py::object replicate(Arg tensors, const DeviceList& devices, Arg peer_access) {
  constexpr const char* kCall = "replicate";
  return run_or_enqueue(pycollect::replicate(tensors_from(tensors, read_access, kCall), devices,
                                             peer_access_from(peer_access, kCall)),
                        Py_False);
}

py::object copy(Arg dst, Arg src, Arg async_op, Arg peer_access) {
  constexpr const char* kCall = "copy_";
  return run_or_enqueue(pycollect::copy(tensor_from(dst, AccessMode::write, {kCall, "dst"}),
                                        tensor_from(src, AccessMode::read, {kCall, "src"}),
                                        peer_access_from(peer_access, kCall)),
                        async_op);
}

// Longest timeout in seconds (32 years), far below the overflow of the clock. A longer one is no
// limit.
constexpr double kLongestTimeout = 1e9;

// Waits without the GIL, which the queue's thread may need to free tensors.
py::object wait(const std::shared_ptr<Work>& work, Arg seconds) {
  std::optional<double> timeout;
  if (!seconds.is_none()) timeout = real_from(seconds, "wait", "timeout");
  require(!timeout || *timeout >= 0, "wait: timeout is ", timeout.value_or(0),
          " seconds; pass None or a number that is not negative");
  if (timeout > kLongestTimeout) timeout.reset();
  bool done = false;
  {
    const py::gil_scoped_release no_gil;
    done = work->wait(timeout);
  }
  if (!done) throw Timeout(text("the collective has not finished within ", *timeout, " seconds"));
  return work->results().empty() ? py::none() : as_list(work->results());
}

py::object exception(Work& work) {
  const std::exception_ptr error = work.exception();
  if (!error) return py::none();
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(e.what());
  }
}

void bind_collectives(py::module_& m) {
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

// Binds conversions for functions that are written in Python, so that they raise the same errors as
// functions in C++.
void bind_conversions(py::module_& m) {
  m.def("int_from", &int_from);
  m.def("flag_from", &flag_from);
}

constexpr const char* kWaitDoc =
    R"(Return the result of the call: None for a collective in place, else its tensors.

Without CUDA tensors, the host waits until the collective has finished, and its error is raised.
With CUDA tensors, the stream of each GPU that is current now waits for the collective, but the host
does not: results may be used on these streams at once. Results in host memory of a call with CUDA
tensors are complete when the call returns, except during the capture of a CUDA graph.

timeout: seconds. The host then waits for CUDA tensors, too. None, and more than 1e9, are no limit.

Raises pycollect.Timeout if the collective has not finished by then: it keeps running, and wait()
may be called again; ValueError for a negative timeout, TypeError for one that is not a number.)";

// Sets an exception of pycollect.errors as Python's current error.
void set_error(const char* type, const std::exception& error) {
  const py::object raised = py::module_::import("pycollect.errors").attr(type);
  PyErr_SetString(raised.ptr(), error.what());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const TypeError& e) {
      PyErr_SetString(PyExc_TypeError, e.what());
    } catch (const PeerLost& e) {
      set_error("PeerLost", e);
    } catch (const Timeout& e) {
      set_error("Timeout", e);
    } catch (const Deadlock& e) {
      set_error("Deadlock", e);
    } catch (const CollectiveError& e) {
      set_error("CollectiveError", e);
    }
  });
  py::class_<Work, std::shared_ptr<Work>>(m, "Work", "A collective called with async_op=True.")
      .def("wait", &wait, py::arg("timeout") = py::none(), kWaitDoc)
      .def("result", &wait, py::arg("timeout") = py::none(), "Wait and return as wait() does.")
      .def("is_completed", &Work::is_completed,
           "Return whether the collective has finished or failed, without waiting.")
      .def("exception", &exception,
           "Return a RuntimeError with the message of a failed collective, else None.\n\n"
           "Always None with CUDA tensors, whose errors the call itself raises.");
  bind_collectives(m);
  bind_conversions(m);
  bind_plan(m);
  bind_distributed(m);
  bind_threads(m);
  bind_machine(m);
}

}  // namespace pycollect
