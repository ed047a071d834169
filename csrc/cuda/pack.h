// Turns the rows of a launch into tables: what fits in one, which blocks work for which row, and
// how wide its accesses are. Allocates nothing on a device and asks CUDA nothing.
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
  std::size_t bytes;  // of the table that are used
  uint32_t blocks;
};

// All tables of a launch, to be issued one after the other. Throws TypeMismatch for a reduction
// that the type does not have, and ValueError for memory that no GPU can read as this type, and for
// more sources of one fold than a table holds (4,000, or 500 with drivers before CUDA 12.1).
void for_each_table(const Launch& launch, const Limits& limits,
                    const std::function<void(const Packed&)>& issue);

}  // namespace pycollect::cuda
