// Binds the scheduler and the store of ranks that are threads to Python.
#include <c10/core/impl/FakeGuardImpl.h>

#include <memory>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "../rank_threads/scheduler.h"
#include "bindings.h"
#include "c10d/threads/thread_store.h"
#include "c10d/threads/turn_state.h"

namespace pycollect {
namespace {

using rank_threads::AbortKind;
using rank_threads::Member;
using rank_threads::RankScheduler;

// Runs `f` with the GIL, and drops errors of Python: the caller has no way to raise them.
template <class F>
void with_gil(F&& f) {
  const py::gil_scoped_acquire gil;
  try {
    f();
  } catch (const py::error_already_set&) {
  }
}

// Python's objects in a scheduler, which threads without the GIL may release.
struct RankObjects {
  std::shared_ptr<dist::RandomStates> random;
  std::shared_ptr<dist::RankVariables> variables;
  py::object find_line;
  py::object cuda_names = py::module_::import("torch.cuda").attr("__dict__");

  // Both run at the ends of a rank's turn, with the GIL.
  void save(Rank r) const {
    random->save(r, cuda_is_initialized());
    variables->save(r);
  }
  void load(Rank r) const {
    random->load(r, cuda_is_initialized());
    variables->load(r);
  }

  static std::shared_ptr<RankObjects> shared(RankObjects objects) {
    return {new RankObjects(std::move(objects)), [](RankObjects* o) {
              const py::gil_scoped_acquire gil;
              delete o;
            }};
  }

 private:
  bool cuda_is_initialized() const {  // as torch.cuda.is_initialized(), without running Python code
    return PyDict_GetItemString(cuda_names.ptr(), "_initialized") == Py_True;
  }
};

std::shared_ptr<RankScheduler> make_scheduler(int world, bool parallel,
                                              std::shared_ptr<dist::RandomStates> random,
                                              std::shared_ptr<dist::RankVariables> variables,
                                              py::object find_line) {
  const auto python =
      RankObjects::shared({std::move(random), std::move(variables), std::move(find_line)});
  RankScheduler::RankHooks hooks;
  hooks.pause = [python](Rank r) { with_gil([&] { python->save(r); }); };
  hooks.resume = [python](Rank r) { with_gil([&] { python->load(r); }); };
  hooks.find_line = [python](Rank r) {
    std::string line;
    with_gil([&] { line = python->find_line(r).cast<std::string>(); });
    return line;
  };
  return std::make_shared<RankScheduler>(world, parallel, std::move(hooks));
}

c10::intrusive_ptr<dist::ThreadStore> make_store(
    const std::shared_ptr<RankScheduler>& scheduler,
    const std::optional<c10::intrusive_ptr<c10d::Store>>& keys) {
  return c10::make_intrusive<dist::ThreadStore>(
      scheduler,
      keys ? *keys : c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::HashStore>()));
}

// Registers the device guard that torch's fake tensors need where a torch with CUDA finds no GPU.
// torch's own function registers one that ends with the calling thread, while all threads use it.
void set_fake_cuda_guard() {
  using namespace c10::impl;
  auto& registered = device_guard_impl_registry[static_cast<std::size_t>(c10::kCUDA)];
  const DeviceGuardImplInterface* found = registered.load();
  if (found == nullptr || found->deviceCount() != 0) return;
  auto lasting = std::make_unique<FakeGuardImpl<c10::kCUDA>>();
  if (registered.compare_exchange_strong(found, lasting.get()))
    static_cast<void>(lasting.release());  // the registry has it for good
}

}  // namespace

void bind_threads(py::module_& m) {
  const auto torch = py::module_::import("torch.distributed");  // binds the base class
  if (!torch.attr("is_available")().cast<bool>()) return;
  py::enum_<AbortKind>(m, "AbortKind")
      .value("PEER_LOST", AbortKind::peer_lost)
      .value("TIMED_OUT", AbortKind::timed_out);
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<dist::RankVariables, std::shared_ptr<dist::RankVariables>>(m, "RankVariables")
      .def(py::init<int, dist::RankVariables::Variables>(), py::arg("world"), py::arg("variables"))
      .def("set", &dist::RankVariables::set, py::arg("rank"), py::arg("module"), py::arg("name"),
           py::arg("value"))
      .def("restore", &dist::RankVariables::restore);
  py::class_<dist::RandomStates, std::shared_ptr<dist::RandomStates>>(m, "RandomStates")
      .def(py::init<int, bool>(), py::arg("world"), py::arg("cuda"))
      .def("restore", &dist::RandomStates::restore, py::arg("cuda"));
  py::class_<Member, std::unique_ptr<Member, py::nodelete>>(m, "RankHelper");
  py::class_<RankScheduler, std::shared_ptr<RankScheduler>>(m, "RankScheduler")
      .def(py::init(&make_scheduler), py::arg("world"), py::arg("parallel"), py::kw_only(),
           py::arg("random"), py::arg("variables"), py::arg("find_line"))
      .def_property_readonly("world", &RankScheduler::world)
      .def("enter", &RankScheduler::enter, py::arg("rank"), no_gil)
      .def("regain_turn", py::overload_cast<>(&RankScheduler::regain_turn), no_gil)
      .def("poll", &RankScheduler::poll, no_gil)
      .def("align", &RankScheduler::align, py::arg("rank"), no_gil)
      .def("leave", &RankScheduler::leave, no_gil)
      .def("add_helper", &RankScheduler::add_helper, py::arg("rank"), no_gil,
           py::return_value_policy::reference)
      .def("become", &RankScheduler::become, py::arg("helper"), no_gil)
      .def("remove_helper", &RankScheduler::remove_helper, py::arg("helper"), no_gil)
      .def("leave_helper", &RankScheduler::leave_helper, no_gil)
      .def("rank_of_thread", &RankScheduler::rank_of_thread)
      .def("abort", py::overload_cast<AbortKind, const std::string&>(&RankScheduler::abort),
           py::arg("kind"), py::arg("cause"), no_gil)
      .def("throw_cause", &RankScheduler::throw_cause, py::arg("operation"), no_gil)
      .def("is_aborted", &RankScheduler::is_aborted, no_gil);
  m.def("is_rank_thread", [] { return RankScheduler::of_thread() != nullptr; });
  m.def("set_fake_cuda_guard", &set_fake_cuda_guard);
  py::class_<dist::ThreadStore, c10d::Store, c10::intrusive_ptr<dist::ThreadStore>>(m,
                                                                                    "ThreadStore")
      .def(py::init(&make_store), py::arg("scheduler"), py::arg("keys") = py::none());
}

}  // namespace pycollect
