// Packs the rows of a launch into tables, and decides which blocks work on which row and how wide
// its accesses are. Allocates no device memory and does not call CUDA.
#pragma once
#include <functional>

#include "api.h"
#include "table.h"

namespace pycollect::cuda {

struct Limits {
  int multiprocessors;
  std::size_t table_bytes = sizeof(LargeTable);
};

enum class KernelKind { fold, copy };
struct Packed {
  KernelKind kind;
  const LargeTable& table;
  std::size_t bytes;  // used bytes of the table
  uint32_t blocks;
};

// Calls `issue` for all tables of a launch, in order. Throws TypeMismatch for a reduction that is
// not defined for the type, and ValueError for memory that is not aligned for the type and for a
// fold of more sources than a table holds (4,000, or 500 with drivers before CUDA 12.1).
void for_each_table(const Launch& launch, const Limits& limits,
                    const std::function<void(const Packed&)>& issue);

}  // namespace pycollect::cuda
