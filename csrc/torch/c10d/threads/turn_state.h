// Of what every rank has its own value while ranks take turns in one process: torch's random states
// and Python's module variables. They are saved at the end of a turn, and loaded for the next one.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../../plan/plan.h"

namespace pycollect::dist {

// Random states: those of torch's default generators, of the CPU and, once CUDA is initialized, of
// all GPUs. `cuda` says whether CUDA is initialized: if not, this class must not call it, which
// would take long and disable CUDA in child processes.
class RandomStates {
 public:
  // Every rank begins with the states of this time, as processes forked now would.
  RandomStates(int world, bool cuda);
  void save(Rank rank, bool cuda) {
    if (!restored_) states_[rank] = current(cuda);
  }
  void load(Rank rank, bool cuda) {
    if (!restored_) set(states_[rank], cuda);
  }
  // Sets the states before the ranks, for good: a rank that the launch left behind loads no more.
  void restore(bool cuda) {
    restored_ = true;
    set(before_, cuda);
  }

 private:
  struct CudaState {
    uint64_t seed, offset;
  };
  struct RandomState {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
    std::vector<CudaState> cuda;  // [device]; empty: CUDA was not initialized
  };
  static RandomState current(bool cuda);
  static void set(const RandomState& state, bool cuda);

  const RandomState before_;
  std::vector<RandomState> states_;
  bool restored_ = false;
};

// Python's module variables. All functions need the GIL. They run no code of Python, which an
// exception from another thread could interrupt.
class RankVariables {
 public:
  // A variable is a module and a name in it. Every rank begins with the current values.
  using Variables = std::vector<std::pair<std::string, std::string>>;
  RankVariables(int world, Variables variables);

  void set(Rank rank, const std::string& module, const std::string& name, py::object value);
  void save(Rank rank);
  void load(Rank rank);
  // Assigns the values before the ranks, for good: a rank that the launch left behind loads no
  // more.
  void restore();

 private:
  using Values = std::vector<py::object>;  // null: the module has not been imported
  struct Place {  // of a variable: an interned key, and the dictionary that has it
    py::object module, key;
    mutable py::object names;  // null: the module has not been imported
    PyObject* find_names() const;
  };
  static std::vector<Place> places_of(const Variables& variables);
  Values current() const;
  void assign(const Values& values) const;

  const Variables variables_;
  const std::vector<Place> places_;
  Values before_;
  std::vector<Values> of_ranks_;
  bool restored_ = false;
};

}  // namespace pycollect::dist
