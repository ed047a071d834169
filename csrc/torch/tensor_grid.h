// The tensors of a list collective, and their groups by dtype: one plan serves a group.
#pragma once
#include "arguments.h"

namespace pycollect {

// Tensors of several ranks: [index * world + rank], where a plain list has one index.
struct TensorGrid {
  Tensors flat;
  int world;
  const char* list = "tensors";  // the argument's name, in messages
  bool nested = false;
  std::size_t width() const { return world == 0 ? 0 : flat.size() / world; }
  Label label(const char* call, std::size_t i, int rank) const {
    return {call, list, rank, nested ? static_cast<int>(i) : -1};
  }
};

// Indices of a grid's tensors of one dtype, and their bytes on one rank.
struct DtypeGroup {
  DType dtype;
  std::size_t bytes = 0;
  std::vector<std::size_t> indices = {};
};

// The groups of a grid, in the order of their first tensors.
std::vector<DtypeGroup> dtype_groups(const char* call, const TensorGrid& grid);

}  // namespace pycollect
