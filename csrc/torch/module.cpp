// pycollect._C: thin functions that take Python's objects apart and hand jobs to the executor.
// Called by pycollect/collectives.py alone, always with every argument, so there are no defaults
// here.
#include "../plan/error.h"
#include "bind_distributed.h"
#include "bind_machine.h"
#include "bind_plan.h"
#include "convert.h"
#include "gpus.h"
#include "profiler_range.h"
#include "work.h"

namespace pycollect {
namespace {

using Args = const py::handle&;

// A call that moves less than this is over before another thread could have taken the interpreter.
constexpr std::size_t kKeepGilBytes = 16 * 1024;

bool peer_access_from(Args flag, const char* call) { return flag_from(flag, call, "peer_access"); }

py::object as_list(const Tensors& tensors) { return py::cast(tensors); }

py::object finish(PreparedCall job, Args async_op) {
  const bool later = flag_from(async_op, job.call, "async_op");
  job.commit();
  if (later) {
    std::shared_ptr<Work> work;
    {
      // What is issued to GPUs may have to wait for pageable memory of the ranks on the host.
      std::optional<py::gil_scoped_release> free;
      if (job.on_gpus() && job.bytes > kKeepGilBytes) free.emplace();
      work = enqueue(std::move(job));
    }
    return py::cast(work);
  }
  {
    std::optional<py::gil_scoped_release> free;
    if (job.bytes > kKeepGilBytes || busy()) free.emplace();
    drain();
    job.run();
  }
  return job.results.empty() ? py::none() : as_list(job.results);
}

py::object finish(PreparedCall job, Args async_op, Args streams, const char* call) {
  const bool nothing = job.devices.empty();  // lists without tensors: there is nothing to order
  if (!streams.is_none() && !nothing) job.streams = streams_from(streams, job.devices, call);
  return finish(std::move(job), async_op);
}

py::object in_place(const InPlaceArgs& ask, py::handle tensors, Args async_op, py::handle streams) {
  Tensors list = tensors_from(tensors, [&](int rank) { return access_of(ask, rank); }, ask.call);
  const int world = static_cast<int>(list.size());
  return finish(pycollect::in_place(ask, {std::move(list), world}), async_op, streams, ask.call);
}

py::object coalesced(const InPlaceArgs& ask, py::handle lists, Args async_op, py::handle streams) {
  TensorGrid grid = grid_from(lists, [&](int rank) { return access_of(ask, rank); }, ask.call);
  return finish(pycollect::in_place(ask, std::move(grid)), async_op, streams, ask.call);
}

py::object all_reduce(Args tensors, Args op, Args algorithm, Args async_op, Args streams,
                      Args peer_access) {
  constexpr const char* kCall = "all_reduce";
  return in_place({.collective = Collective::all_reduce,
                   .call = kCall,
                   .op = op_from(op, kCall),
                   .algorithm = algorithm_from(algorithm, kCall),
                   .peer_access = peer_access_from(peer_access, kCall)},
                  tensors, async_op, streams);
}

py::object all_reduce_coalesced(Args lists, Args op, Args algorithm, Args async_op, Args streams,
                                Args peer_access) {
  constexpr const char* kCall = "all_reduce_coalesced";
  return coalesced({.collective = Collective::all_reduce,
                    .call = kCall,
                    .op = op_from(op, kCall),
                    .algorithm = algorithm_from(algorithm, kCall),
                    .peer_access = peer_access_from(peer_access, kCall)},
                   lists, async_op, streams);
}

py::object reduce(Args tensors, Args dst, Args op, Args algorithm, Args async_op, Args streams,
                  Args peer_access) {
  constexpr const char* kCall = "reduce";
  return in_place({.collective = Collective::reduce,
                   .call = kCall,
                   .op = op_from(op, kCall),
                   .root = int_from(dst, kCall, "dst"),
                   .algorithm = algorithm_from(algorithm, kCall),
                   .peer_access = peer_access_from(peer_access, kCall)},
                  tensors, async_op, streams);
}

InPlaceArgs broadcast_of(Args src, Args algorithm, Args peer_access, const char* call) {
  return {.collective = Collective::broadcast,
          .call = call,
          .root = int_from(src, call, "src"),
          .root_name = "src",
          .algorithm = algorithm_from(algorithm, call),
          .peer_access = peer_access_from(peer_access, call)};
}
py::object broadcast(Args tensors, Args src, Args algorithm, Args async_op, Args streams,
                     Args peer_access) {
  return in_place(broadcast_of(src, algorithm, peer_access, "broadcast"), tensors, async_op,
                  streams);
}
py::object broadcast_coalesced(Args lists, Args src, Args async_op, Args streams,
                               Args peer_access) {
  return coalesced(broadcast_of(src, py::none(), peer_access, "broadcast_coalesced"), lists,
                   async_op, streams);
}

std::optional<Tensors> out_from(Args out, const char* call) {
  if (out.is_none()) return std::nullopt;
  return tensors_from(out, written, call, "out");
}

py::object exchanged(BlockArgs ask, Args tensors, Args async_op, Args streams) {
  const char* call = name(ask.collective);
  Tensors inputs = tensors_from(tensors, only_read, call);
  DeviceList ranks;
  for (const at::Tensor& t : inputs) ranks.push_back(t.device());
  ask.streams = streams_from(streams, ranks, call);
  return finish(block_collective(ask, std::move(inputs)), async_op);
}

py::object all_gather(Args tensors, Args dim, Args algorithm, Args out, Args async_op, Args streams,
                      Args peer_access) {
  constexpr const char* kCall = "all_gather";
  return exchanged({.collective = Collective::all_gather,
                    .dim = int_from(dim, kCall, "dim"),
                    .algorithm = algorithm_from(algorithm, kCall),
                    .out = out_from(out, kCall),
                    .peer_access = peer_access_from(peer_access, kCall)},
                   tensors, async_op, streams);
}

py::object reduce_scatter(Args tensors, Args op, Args dim, Args algorithm, Args out, Args async_op,
                          Args streams, Args peer_access) {
  constexpr const char* kCall = "reduce_scatter";
  return exchanged({.collective = Collective::reduce_scatter,
                    .op = op_from(op, kCall),
                    .dim = int_from(dim, kCall, "dim"),
                    .algorithm = algorithm_from(algorithm, kCall),
                    .out = out_from(out, kCall),
                    .peer_access = peer_access_from(peer_access, kCall)},
                   tensors, async_op, streams);
}

// A size per block, of one rank.
std::vector<int64_t> sizes_from(py::handle sizes, const char* call, const char* name) {
  require_type(PySequence_Check(sizes.ptr()) && !PyUnicode_Check(sizes.ptr()), call, ": ", name,
               " is a ", Py_TYPE(sizes.ptr())->tp_name, "; pass a list of ints");
  std::vector<int64_t> result;
  for (py::handle s : sizes) result.push_back(int_from(s, call, name));
  return result;
}

// One list for all ranks alike, or a list of each.
std::vector<std::vector<int64_t>> split_sizes_from(Args sizes, const char* call) {
  constexpr const char* kSizes = "split_sizes";
  const bool nested = PySequence_Check(sizes.ptr()) && py::len(sizes) > 0 &&
                      PySequence_Check(sizes[py::int_(0)].ptr());
  if (!nested) return {sizes_from(sizes, call, kSizes)};
  std::vector<std::vector<int64_t>> result;
  for (py::handle s : sizes) result.push_back(sizes_from(s, call, kSizes));
  return result;
}

py::object all_to_all(Args tensors, Args dim, Args split_sizes, Args out, Args async_op,
                      Args streams, Args peer_access) {
  constexpr const char* kCall = "all_to_all";
  BlockArgs ask{.collective = Collective::all_to_all,
                .dim = int_from(dim, kCall, "dim"),
                .out = out_from(out, kCall),
                .peer_access = peer_access_from(peer_access, kCall)};
  if (!split_sizes.is_none()) ask.sizes = split_sizes_from(split_sizes, kCall);
  return exchanged(ask, tensors, async_op, streams);
}

py::object scatter(Args tensor, const DeviceList& devices, Args chunk_sizes, Args dim, Args out,
                   Args async_op, Args streams, Args peer_access) {
  constexpr const char* kCall = "scatter";
  BlockArgs ask{.collective = Collective::scatter,
                .dim = int_from(dim, kCall, "dim"),
                .out = out_from(out, kCall),
                .devices = devices,
                .peer_access = peer_access_from(peer_access, kCall)};
  if (!chunk_sizes.is_none()) ask.sizes = {{sizes_from(chunk_sizes, kCall, "chunk_sizes")}};
  ask.streams = streams_from(streams, devices, kCall);
  return finish(block_collective(ask, {tensor_from(tensor, AccessMode::read, {kCall, "tensor"})}),
                async_op);
}

py::object gather(Args tensors, const DeviceList& device, Args dim, Args out, Args streams,
                  Args peer_access) {
  constexpr const char* kCall = "gather";
  BlockArgs ask{.collective = Collective::gather,
                .dim = int_from(dim, kCall, "dim"),
                .devices = device,
                .peer_access = peer_access_from(peer_access, kCall)};
  if (!out.is_none()) ask.out = {tensor_from(out, AccessMode::write, {kCall, "out"})};
  const py::list results = exchanged(ask, tensors, Py_False, streams);
  return results[0];
}

py::object replicate(Args tensors, const DeviceList& devices, Args peer_access) {
  constexpr const char* kCall = "replicate";
  return finish(pycollect::replicate(tensors_from(tensors, only_read, kCall), devices,
                                     peer_access_from(peer_access, kCall)),
                Py_False);
}

py::object copy(Args dst, Args src, Args async_op, Args peer_access) {
  constexpr const char* kCall = "copy_";
  return finish(pycollect::copy(tensor_from(dst, AccessMode::write, {kCall, "dst"}),
                                tensor_from(src, AccessMode::read, {kCall, "src"}),
                                peer_access_from(peer_access, kCall)),
                async_op);
}

// Longer than anybody waits, and far from where the clock's own numbers end.
constexpr double kForever = 1e9;

// Without the interpreter: the queue may need it to let go of tensors.
py::object wait(const std::shared_ptr<Work>& work, Args seconds) {
  std::optional<double> timeout;
  if (!seconds.is_none()) timeout = real_from(seconds, "wait", "timeout");
  require(!timeout || *timeout >= 0, "wait: timeout is ", timeout.value_or(0),
          "; it is in seconds, and not negative");
  if (timeout > kForever) timeout.reset();
  bool done = false;
  {
    const py::gil_scoped_release free;
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
        const ProfilerRange here("barrier");
        drain();
      },
      py::call_guard<py::gil_scoped_release>());
}

// The functions that are written in Python take these as those above do.
void bind_conversions(py::module_& m) {
  m.def("int_from", &int_from);
  m.def("flag_from", &flag_from);
}

// One of pycollect.errors.
void set_error(const char* type, const std::exception& error) {
  const py::object raised = py::module_::import("pycollect.errors").attr(type);
  PyErr_SetString(raised.ptr(), error.what());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const TypeMismatch& e) {
      PyErr_SetString(PyExc_TypeError, e.what());
    } catch (const PeerLost& e) {
      set_error("PeerLost", e);
    } catch (const Timeout& e) {
      set_error("Timeout", e);
    } catch (const CollectiveError& e) {
      set_error("CollectiveError", e);
    }
  });
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("wait", &wait, py::arg("timeout") = py::none())
      .def("result", &wait, py::arg("timeout") = py::none())
      .def("is_completed", &Work::is_completed)
      .def("exception", &exception);
  bind_collectives(m);
  bind_conversions(m);
  bind_plan(m);
  bind_distributed(m);
  bind_machine(m);
}

}  // namespace pycollect
