// See rank_variables.h.
#include "rank_variables.h"

#include <algorithm>

#include "../plan/error.h"

namespace pycollect {
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

}  // namespace pycollect
