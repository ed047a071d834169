// Symbolic execution of a plan: a fold builds a term from its sources' terms, and a copy's
// destination gets its source's term. `verify` compares the terms with the expected ones.
#pragma once
#include <compare>
#include <cstddef>
#include <vector>

#include "dtype.h"
#include "plan.h"

namespace pycollect {

struct Leaf {  // chunk `chunk` of the initial data of rank `rank`
  Rank rank;
  int chunk;
  auto operator<=>(const Leaf&) const = default;
};
using Leaves = std::vector<Leaf>;

using TermId = int;
inline constexpr TermId kUnwritten = 0;  // the term of unwritten cells, and of sums of them

// A sum of other terms, in the order of the run, or one leaf.
struct Term {
  Leaf leaf{-1, -1};
  std::vector<TermId> parts = {};
  int leaves = 0;         // their number; saturates at world + 1, which is never a right result
  bool canonical = true;  // the sum has the brackets of a fold of its leaves in the run's order
  int roundings = 0;      // roundings on the longest path to a leaf, this sum's included
};

class SymbolicRun {
 public:
  // `initial`: the buffer that contains one leaf per chunk on every rank when the run begins.
  SymbolicRun(const Plan& plan, bool in_place, Buffer initial, FoldOrder order);

  TermId at(const Slice& s) const { return memory_[cell(s)]; }  // the term of the first chunk
  const Term& term(TermId id) const { return terms_[id]; }
  std::size_t terms() const { return terms_.size(); }
  bool is_leaf(TermId id, Leaf leaf) const {
    return terms_[id].parts.empty() && terms_[id].leaf == leaf;
  }

  // Returns the leaves in the order of addition. Only for terms with at most `world` leaves.
  Leaves leaves(TermId id) const;

  // Marks in `ranks` every rank with a leaf in the term. `seen` [term] skips visited terms.
  void mark_ranks(TermId id, std::vector<bool>& seen, std::vector<bool>& ranks) const;

 private:
  int cell(const Slice& s) const;
  void run(const Step& step, int i);
  TermId combine(std::vector<TermId> srcs);
  bool fits(const Term& src, std::size_t i, const std::vector<TermId>& srcs) const;

  const Plan& plan_;
  bool in_place_;
  FoldOrder order_;
  std::vector<TermId> memory_;  // [cell]
  std::vector<Term> terms_;
};

}  // namespace pycollect
