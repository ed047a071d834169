// The table of the collectives on lists: one declaration each, of which bind_collectives.cpp makes
// the function that Python calls, and ops.cpp torch's operators. The signatures and the text for
// users are in pycollect/collectives.py and pycollect/collectives_along_dim.py.
#pragma once
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "from_python.h"

namespace pycollect {

// The arguments of a call from Python.
struct PythonCall {
  ListArgs args;
  Producers producers = {};  // the streams of memory that is not torch's
};

struct Parameter {
  const char* name;
  const char* schema;  // in the operators
  // Takes a value from Python; null for a parameter of the operators alone.
  void (*from_python)(PythonCall& call, py::handle value, const Parameter& self);
  // Takes a value of an operator.
  void (*from_stack)(ListArgs& args, const c10::IValue& value);
  enum Role { read, written, keyword, out } role = read;
};

struct Declaration {
  const char* name;  // of the Python function
  Collective collective;
  ListCall (*prepare)(ListArgs args);
  // In the order of the Python function, which has async_op, streams and peer_access after them.
  std::vector<const Parameter*> parameters;
  // The result of the operator that returns new tensors: "Tensor" or "Tensor[]"; null if there is
  // no such operator.
  const char* result = nullptr;
  bool in_python = true;  // false: operators alone

  ListArgs args() const { return {.collective = collective, .call = name}; }
  bool has_one_result() const { return result == std::string_view("Tensor"); }
};
const std::vector<Declaration>& declarations();

// The operators of a declaration: one in place for a parameter that is written, one that returns
// new tensors, and one that writes the caller's.
enum class Form { in_place, functional, out };
struct Operator {
  Form form;
  std::string name;    // with the name of the overload
  std::string schema;  // with the name
  std::vector<const Parameter*> parameters;
};
std::vector<Operator> operators_of(const Declaration& declaration);

}  // namespace pycollect
