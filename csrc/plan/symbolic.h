// A plan run on terms instead of numbers: every fold makes a term of its sources' terms, every copy
// shares one. What the terms should have been is `verify`'s business.
#pragma once
#include <compare>
#include <cstddef>
#include <vector>

#include "plan.h"

namespace pycollect {

struct Leaf {  // chunk `chunk` of what rank `rank` brought
  Rank rank;
  int chunk;
  auto operator<=>(const Leaf&) const = default;
};
using Leaves = std::vector<Leaf>;

using TermId = int;
inline constexpr TermId kUnwritten = 0;  // what nobody has written, and every sum with it

// ((a + b) + c) + ... of other terms, or one leaf.
struct Term {
  Leaf leaf{-1, -1};
  std::vector<TermId> parts = {};
  int leaves = 0;     // how many; saturates above the world, where it is wrong anyway
  bool left = true;   // a left fold, and no other brackets
  int roundings = 0;  // times a partial sum went through memory on the way
};

class SymbolicRun {
 public:
  // `brought`: the buffer in which every rank starts with a leaf a chunk.
  SymbolicRun(const Plan& plan, bool in_place, Buffer brought);

  TermId at(const Slice& s) const { return memory_[cell(s)]; }  // its first chunk
  const Term& term(TermId id) const { return terms_[id]; }
  std::size_t terms() const { return terms_.size(); }
  bool is_leaf(TermId id, Leaf leaf) const {
    return terms_[id].parts.empty() && terms_[id].leaf == leaf;
  }

  // In the order they were added. Only for terms of no more leaves than ranks.
  Leaves leaves(TermId id) const;

  // Marks the ranks with a leaf anywhere below, however often; `seen` is per term.
  void heard(TermId id, std::vector<bool>& seen, std::vector<bool>& ranks) const;

 private:
  int cell(const Slice& s) const;
  void run(const Step& step, int i);
  TermId combine(std::vector<TermId> srcs);

  const Plan& plan_;
  bool in_place_;
  std::vector<TermId> memory_;  // [cell]
  std::vector<Term> terms_;
};

}  // namespace pycollect
