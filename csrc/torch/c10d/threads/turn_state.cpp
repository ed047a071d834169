// See turn_state.h.
#include "turn_state.h"

#include <ATen/Context.h>

#include <algorithm>
#include <mutex>

#include "../../../plan/error.h"

namespace pycollect::dist {
namespace {

at::CPUGeneratorImpl& cpu_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

std::vector<at::Generator> generators_of_gpus() {
  std::vector<at::Generator> found;
  const c10::DeviceIndex devices = at::detail::getCUDAHooks().deviceCount();
  for (c10::DeviceIndex d = 0; d < devices; ++d)
    found.push_back(at::globalContext().defaultGenerator(at::Device(at::kCUDA, d)));
  return found;
}

}  // namespace

RandomStates::RandomStates(int world, bool cuda)
    : before_(current(cuda)), states_(world, before_) {}

RandomStates::RandomState RandomStates::current(bool cuda) {
  at::CPUGeneratorImpl& cpu = cpu_generator();
  const std::lock_guard lock(cpu.mutex_);
  RandomState state{
      cpu.engine(), cpu.next_float_normal_sample(), cpu.next_double_normal_sample(), {}};
  if (!cuda) return state;
  for (at::Generator generator : generators_of_gpus()) {
    const std::lock_guard device_lock(generator.mutex());
    state.cuda.push_back({generator.current_seed(), generator.get_offset()});
  }
  return state;
}

// If CUDA has been initialized since the state was saved, the GPUs get the seed of the CPU:
// torch.manual_seed sets both.
void RandomStates::set(const RandomState& state, bool cuda) {
  at::CPUGeneratorImpl& cpu = cpu_generator();
  const std::lock_guard lock(cpu.mutex_);
  cpu.set_engine(state.engine);
  cpu.set_next_float_normal_sample(state.next_float);
  cpu.set_next_double_normal_sample(state.next_double);
  if (!cuda) return;
  std::vector<at::Generator> generators = generators_of_gpus();
  for (std::size_t d = 0; d < generators.size(); ++d) {
    at::Generator& generator = generators[d];
    const std::lock_guard device_lock(generator.mutex());
    const CudaState of_seed{state.engine.seed(), 0};
    const CudaState& own = state.cuda.empty() ? of_seed : state.cuda[d];
    generator.set_current_seed(own.seed);
    generator.set_offset(own.offset);
  }
}
namespace {

py::object reference(PyObject* borrowed) { return py::reinterpret_borrow<py::object>(borrowed); }

py::object interned(const std::string& text) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text.c_str()));
}

}  // namespace

PyObject* RankVariables::Place::find_names() const {
  if (names) return names.ptr();
  PyObject* const found = PyDict_GetItem(PyImport_GetModuleDict(), module.ptr());
  if (found != nullptr && PyModule_Check(found)) names = reference(PyModule_GetDict(found));
  return names.ptr();
}

std::vector<RankVariables::Place> RankVariables::places_of(const Variables& variables) {
  std::vector<Place> places;
  for (const auto& [module, name] : variables)
    places.push_back({interned(module), interned(name), {}});
  return places;
}

RankVariables::RankVariables(int world, Variables variables)
    : variables_(std::move(variables)),
      places_(places_of(variables_)),
      before_(current()),
      of_ranks_(world, before_) {}

void RankVariables::set(Rank rank, const std::string& module, const std::string& name,
                        py::object value) {
  const auto found = std::find(variables_.begin(), variables_.end(), std::pair(module, name));
  require(found != variables_.end(), module, ".", name, " is not a variable of ranks");
  of_ranks_[rank][found - variables_.begin()] = std::move(value);
}

void RankVariables::save(Rank rank) {
  if (!restored_) of_ranks_[rank] = current();
}

void RankVariables::load(Rank rank) {
  if (!restored_) assign(of_ranks_[rank]);
}

void RankVariables::restore() {
  restored_ = true;
  assign(before_);
}

RankVariables::Values RankVariables::current() const {
  Values values;
  values.reserve(places_.size());
  for (const Place& place : places_) {
    PyObject* const names = place.find_names();
    values.push_back(names == nullptr ? py::object()
                                      : reference(PyDict_GetItem(names, place.key.ptr())));
  }
  return values;
}

// A variable of a module that another rank has imported meanwhile becomes None.
void RankVariables::assign(const Values& values) const {
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (PyObject* const names = places_[i].find_names())
      if (PyDict_SetItem(names, places_[i].key.ptr(), values[i] ? values[i].ptr() : Py_None) != 0)
        PyErr_Clear();
}

}  // namespace pycollect::dist
