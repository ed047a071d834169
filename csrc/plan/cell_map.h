// A value for each cell of a plan, for passes over the steps. The plan for one host of many has as
// many cells as that of the whole world but uses few of them, so that a table would be too large.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plan.h"

namespace pycollect {

// Returns whether a table of all cells is much larger than the plan.
inline bool uses_few_cells(const Plan& plan) {
  constexpr std::size_t kSmall = 1 << 16, kTimes = 8;
  const auto all = static_cast<std::size_t>(cells(plan));
  if (all <= kSmall) return false;
  std::size_t slices = 0;
  for (const Step& step : plan.steps) slices += step.dsts.size() + step.srcs.size();
  return all > kTimes * slices;
}

// A table, or a hash table with linear probing if the plan uses few cells. (std::unordered_map made
// a rank's program of 4096 ranks take twice as long.)
template <class T>
class CellMap {
 public:
  CellMap(const Plan& plan, T initial) : initial_(std::move(initial)) {
    if (uses_few_cells(plan))
      few_.resize(kFirst, {kFree, initial_});
    else
      table_.resize(cells(plan), initial_);
  }
  // The reference is valid until the next access to another cell.
  T& operator[](int cell) {
    if (few_.empty()) return table_[cell];
    std::size_t at = place(cell);
    if (few_[at].cell == cell) return few_[at].value;
    if (2 * ++used_ > few_.size()) {
      grow();
      at = place(cell);
    }
    few_[at].cell = cell;
    return few_[at].value;
  }
  const T& operator[](int cell) const {
    if (few_.empty()) return table_[cell];
    const UsedCell& found = few_[place(cell)];
    return found.cell == cell ? found.value : initial_;
  }

 private:
  static constexpr int kFree = -1;
  static constexpr std::size_t kFirst = 1 << 10;  // entries; always a power of two
  struct UsedCell {
    int cell;
    T value;
  };

  // Returns where the cell is, or the free entry for it.
  std::size_t place(int cell) const {
    const uint64_t hash = static_cast<uint64_t>(cell) * 0x9E3779B97F4A7C15U;  // 2^64 / golden ratio
    std::size_t at = hash >> 32 & (few_.size() - 1);
    while (few_[at].cell != kFree && few_[at].cell != cell) at = (at + 1) & (few_.size() - 1);
    return at;
  }
  void grow() {
    std::vector<UsedCell> old(2 * few_.size(), {kFree, initial_});
    old.swap(few_);
    for (UsedCell& entry : old)
      if (entry.cell != kFree) few_[place(entry.cell)] = std::move(entry);
  }

  T initial_;
  std::vector<T> table_;       // [cell]
  std::vector<UsedCell> few_;  // of the cells that have been used
  std::size_t used_ = 0;
};

}  // namespace pycollect
