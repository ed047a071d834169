// The module pycollect._C: the collectives, their Work, and its errors.
#include "../plan/error.h"
#include "bindings.h"
#include "from_python.h"
#include "list_call.h"

namespace pycollect {
namespace {

// Longest timeout in seconds (32 years), far below the overflow of the clock. A longer one is no
// limit.
constexpr double kLongestTimeout = 1e9;

// Waits without the GIL, which the queue's thread may need to free tensors.
py::object wait(const std::shared_ptr<Work>& work, const py::handle& seconds) {
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
  if (!done)
    throw Timeout(
        text("the collective has not finished within the timeout of ", *timeout, " seconds"));
  return work->results().empty() ? py::none() : py::cast(work->results());
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
