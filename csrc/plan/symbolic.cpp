// Terms are stored in one list and identified by their index, so a copy costs nothing, and a sum of
// W parts costs W however many ranks share it.
#include "symbolic.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace pycollect {

SymbolicRun::SymbolicRun(const Plan& plan, bool in_place, Buffer initial, FoldOrder order)
    : plan_(plan), in_place_(in_place), order_(order), memory_(cells(plan), kUnwritten), terms_(1) {
  for (Rank r = 0; r < plan.world; ++r)
    for (int c = 0; c < plan.chunks; ++c) {
      memory_[cell({r, initial, c})] = static_cast<TermId>(terms_.size());
      terms_.push_back({.leaf = {r, c}, .leaves = 1});
    }
  for (const Step& step : plan.steps)
    for (int i = 0; i < step.dsts.front().count; ++i) run(step, i);
}

int SymbolicRun::cell(const Slice& s) const {
  int at = 0;
  each_cell(plan_, in_place_, {s.rank, s.buffer, s.first}, [&](int c) { at = c; });
  return at;
}

void SymbolicRun::run(const Step& step, int i) {
  auto part = [i](const Slice& s) { return Slice{s.rank, s.buffer, s.first + i}; };
  std::vector<TermId> srcs;
  srcs.reserve(step.srcs.size());
  for (const Slice& s : step.srcs) srcs.push_back(at(part(s)));
  const TermId result = combine(std::move(srcs));
  for (const Slice& d : step.dsts) memory_[cell(part(d))] = result;
}

TermId SymbolicRun::combine(std::vector<TermId> srcs) {
  if (srcs.size() == 1) return srcs.front();
  Term sum;
  for (std::size_t i = 0; i < srcs.size(); ++i) {
    if (srcs[i] == kUnwritten) return kUnwritten;
    const Term& src = terms_[srcs[i]];
    sum.canonical &= src.canonical && fits(src, i, srcs);
    sum.roundings = std::max(sum.roundings, src.roundings);
    sum.leaves = std::min(sum.leaves + src.leaves, plan_.world + 1);
  }
  ++sum.roundings;
  sum.parts = std::move(srcs);
  terms_.push_back(std::move(sum));
  return static_cast<TermId>(terms_.size()) - 1;
}

// Whether source i of a fold leaves the brackets those of a fold of all leaves. In tree order, all
// sources but the last must have the same power of two of leaves, and the last one no more.
bool SymbolicRun::fits(const Term& src, std::size_t i, const std::vector<TermId>& srcs) const {
  if (order_ == FoldOrder::rank) return i == 0 || src.leaves == 1;
  const auto most = static_cast<unsigned>(terms_[srcs.front()].leaves);
  if (i + 1 == srcs.size()) return src.leaves <= static_cast<int>(most);
  return std::has_single_bit(most) && src.leaves == static_cast<int>(most);
}

Leaves SymbolicRun::leaves(TermId id) const {
  Leaves all;
  std::vector<TermId> next{id};  // a stack with the leftmost term on top: terms may nest deeply
  while (!next.empty()) {
    const Term& t = terms_[next.back()];
    next.pop_back();
    if (t.parts.empty() && t.leaves == 1) all.push_back(t.leaf);
    next.insert(next.end(), t.parts.rbegin(), t.parts.rend());
  }
  return all;
}

void SymbolicRun::mark_ranks(TermId id, std::vector<bool>& seen, std::vector<bool>& ranks) const {
  std::vector<TermId> next{id};
  while (!next.empty()) {
    const TermId at = next.back();
    next.pop_back();
    if (seen[at]) continue;
    seen[at] = true;
    const Term& t = terms_[at];
    if (t.parts.empty() && t.leaves == 1) ranks[t.leaf.rank] = true;
    next.insert(next.end(), t.parts.begin(), t.parts.end());
  }
}

}  // namespace pycollect
