// Python's module variables of which every rank has its own value, while ranks take turns.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "../plan/plan.h"

namespace pycollect {

// All functions need the GIL. They run no code of Python, which an exception from another thread
// could interrupt.
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

}  // namespace pycollect
