// The tensors of a list collective, and their groups by dtype, each of which runs one plan.
#pragma once
#include "arguments.h"

namespace pycollect {

// The same number of tensors of each rank: flat[index * world + rank]. A plain list, one tensor per
// rank, has only index 0.
struct TensorGrid {
  Tensors flat;
  int world;
  const char* list = "tensors";  // the argument's name, for error messages
  bool nested = false;
  std::size_t width() const { return world == 0 ? 0 : flat.size() / world; }
  ArgumentName label(const char* call, std::size_t i, int rank) const {
    return {call, list, rank, nested ? static_cast<int>(i) : -1};
  }
};

// The tensors of one dtype in a grid: their indices, and their bytes on one rank.
struct DtypeGroup {
  DType dtype;
  std::size_t bytes = 0;
  std::vector<std::size_t> indices = {};
};

using DtypeOf = DType (*)(const at::Tensor& tensor, const ArgumentName& label);
// Returns the groups of a grid, in the order of their first tensors.
std::vector<DtypeGroup> dtype_groups(const char* call, const TensorGrid& grid, DtypeOf dtype_of);

}  // namespace pycollect
