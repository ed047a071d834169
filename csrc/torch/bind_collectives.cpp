// Binds the collectives on lists: each function converts Python's arguments as its declaration
// says, prepares a call and runs it.
#include <cxxabi.h>
#include <pybind11/detail/exception_translation.h>

#include <span>

#include "../plan/error.h"
#include "bindings.h"
#include "declarations.h"
#include "list_call.h"
#include "profiler.h"

namespace pycollect {
namespace {

// Calls that move at most this many bytes keep the GIL: they end before another thread could take
// it.
constexpr std::size_t kKeepGilBytes = 16 * 1024;

// Whether another thread should be able to take the GIL meanwhile: the call moves many bytes, or
// the host waits for a device, because a rank is in host memory.
bool takes_long(const ListCall& call) {
  return call.bytes > kKeepGilBytes || (call.on_gpus() && call.on_host());
}

std::shared_ptr<Work> run_later(ListCall call) {
  std::optional<py::gil_scoped_release> no_gil;
  if (call.on_gpus()) {  // not in the queue of host calls, but behind them
    if (takes_long(call) || busy()) no_gil.emplace();
    drain();
  }
  return enqueue(std::move(call));
}

void run_now(const ListCall& call) {
  std::optional<py::gil_scoped_release> no_gil;
  if (takes_long(call) || busy()) no_gil.emplace();
  drain();
  call.run();
}

// A function of Python: its declaration, and the parameters that Python has.
struct Function {
  const Declaration& declaration;
  std::vector<const Parameter*> parameters = {};
  PyMethodDef method = {};

  // `values`: those of all parameters, then async_op, streams and peer_access.
  py::object operator()(std::span<PyObject* const> values) const {
    const std::size_t count = parameters.size();
    const char* name = declaration.name;
    require_type(values.size() == count + 3, name, ": takes ", count + 3, " arguments");
    PythonCall from{declaration.args()};
    const bool async = flag_from(values[count], name, "async_op");
    const py::handle streams = values[count + 1];
    from.args.peer_access = flag_from(values[count + 2], name, "peer_access");
    // Backwards: how the tensors, which are first, are used depends on the other arguments.
    for (std::size_t i = count; i-- > 0;)
      parameters[i]->from_python(from, values[i], *parameters[i]);
    const ListArgs& args = from.args;
    if (!streams.is_none() && !args.inputs.flat.empty())
      from.args.streams = streams_from(
          streams, args.collective == Collective::scatter ? args.devices : args.inputs.devices(),
          name);
    ListCall call = declaration.prepare(std::move(from.args));
    call.producers = std::move(from.producers);
    call.commit();
    if (async) return py::cast(run_later(std::move(call)));
    run_now(call);
    if (call.results.empty()) return py::none();
    return declaration.has_one_result() ? py::cast(call.results[0]) : py::cast(call.results);
  }
};

// Python's calling convention for positional arguments: pybind11's functions cost more.
PyObject* call_function(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  try {
    const auto& function = *static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr));
    return function({values, static_cast<std::size_t>(count)}).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
#ifdef __GLIBCXX__
  } catch (abi::__forced_unwind&) {  // Python ends a daemon thread when it ends itself
    throw;
#endif
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

// The functions live as long as the process.
void bind_function(py::module_& m, const Declaration& declaration) {
  auto* function = new Function{declaration};
  for (const Parameter* p : declaration.parameters)
    if (p->from_python != nullptr) function->parameters.push_back(p);
  function->method = {declaration.name,
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_function)),
                      METH_FASTCALL, nullptr};
  const py::capsule self(function);
  m.attr(declaration.name) = py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&function->method, self.ptr(), m.attr("__name__").ptr()));
}

}  // namespace

void bind_collectives(py::module_& m) {
  for (const Declaration& declaration : declarations())
    if (declaration.in_python) bind_function(m, declaration);
  m.def(
      "drain",
      [] {
        const ProfilerRange range("barrier");
        drain();
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace pycollect
