// Compares the content of every chunk after a symbolic run with the promise of the collective, and
// describes the first difference in words.
#include "verify.h"

#include <algorithm>
#include <bit>
#include <compare>
#include <cstddef>
#include <utility>

#include "error.h"

namespace pycollect {
namespace {

struct Leaf {  // chunk `chunk` of the initial data of rank `rank`
  Rank rank;
  int chunk;
  auto operator<=>(const Leaf&) const = default;
};
using Leaves = std::vector<Leaf>;

using TermId = int;
constexpr TermId kUnwritten = 0;  // the term of unwritten cells, and of sums of them

// A sum of other terms, in the order of the run, or one leaf.
struct Term {
  Leaf leaf{-1, -1};
  std::vector<TermId> parts = {};
  int leaves = 0;         // their number; saturates at world + 1, which is never a right result
  bool canonical = true;  // the sum has the brackets of a fold of its leaves in the run's order
  int roundings = 0;      // roundings on the longest path to a leaf, this sum's included
};

// Symbolic execution of a plan: a fold builds a term from its sources' terms, and a copy's
// destination gets its source's term. Terms are stored in one list and identified by their index,
// so a copy costs nothing, and a sum of W parts costs W however many ranks share it.
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
  int cell(const Slice& s) const { return first_cell(plan_, in_place_, s); }
  void run(const Step& step, int i);
  TermId combine(std::vector<TermId> srcs);
  bool fits(const Term& src, std::size_t i, const std::vector<TermId>& srcs) const;

  const Plan& plan_;
  bool in_place_;
  FoldOrder order_;
  std::vector<TermId> memory_;  // [cell]
  std::vector<Term> terms_;
};

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

constexpr int kNone = -1;

// The required content of an output chunk of a rank.
struct ExpectedChunk {
  enum { kept, leaf, sum } kind;
  Leaf one{-1, -1};  // the leaf; for a sum only its chunk counts
};

// Returns the required content of a chunk. If the collective has blocks, they have `per_block`
// chunks: chunk c belongs to block c / per_block.
ExpectedChunk wanted(Collective collective, int per_block, Rank root, const Slice& at) {
  const int c = at.first, block = c / per_block;
  const ExpectedChunk kept{ExpectedChunk::kept}, sum{ExpectedChunk::sum, {-1, c}};
  auto only = [&](bool receives, ExpectedChunk want) { return receives ? want : kept; };
  switch (collective) {
    case Collective::all_reduce:
      return sum;
    case Collective::reduce:
      return only(at.rank == root, sum);
    case Collective::broadcast:
      return {ExpectedChunk::leaf, {root, c}};
    case Collective::all_gather:
      return {ExpectedChunk::leaf, {block, c}};
    case Collective::reduce_scatter:
      return only(block == at.rank, sum);
    case Collective::all_to_all:
      return {ExpectedChunk::leaf, {block, at.rank * per_block + c % per_block}};
    case Collective::scatter:
      return only(block == at.rank, {ExpectedChunk::leaf, {root, c}});
    case Collective::gather:
      return only(at.rank == root, {ExpectedChunk::leaf, {block, c}});
    case Collective::barrier:
      return kept;
  }
  return kept;
}

bool has_blocks(Collective c) {
  return c != Collective::all_reduce && c != Collective::reduce && c != Collective::broadcast &&
         c != Collective::barrier;
}

std::string words(Leaf leaf) { return text("x", leaf.rank, "[", leaf.chunk, "]"); }

std::string words(const Leaves& leaves) {
  constexpr std::size_t kShown = 8;  // a longer sum is shortened to its first and last terms
  const std::size_t n = leaves.size();
  std::string shown;
  for (std::size_t i = 0; i < n; ++i) {
    if (n > kShown && i > 2 && i + 1 < n) continue;
    shown += text(i > 0 ? " + " : "", n > kShown && i > 2 ? "... + " : "", words(leaves[i]));
  }
  return n > kShown ? text(shown, " (", n, " terms)") : shown;
}

class OrderCheck {
 public:
  OrderCheck(Collective collective, const Plan& plan, Rank root, bool in_place, FoldOrder order)
      : collective_(collective),
        plan_(plan),
        root_(root),
        in_place_(in_place),
        run_(plan, in_place, Buffer::input, order),
        summed_(run_.terms(), FoldTerms{}) {}

  Verification run() {
    for (Rank r = 0; r < plan_.world && verification_.right(); ++r)
      for (int c = 0; c < plan_.chunks && verification_.right(); ++c) {
        output(out(r, c));
        if (!in_place_) input(in(r, c));
      }
    return verification_;
  }

 private:
  struct FoldTerms {
    int chunk = -1;  // the chunk whose complete sum the term is; -1: none found
    Order order = Order::exact;
  };

  void output(const Slice& at) {
    ExpectedChunk want = wanted(collective_, std::max(1, plan_.chunks / plan_.world), root_, at);
    const TermId got = run_.at(at);
    if (want.kind == ExpectedChunk::kept && !in_place_) {
      if (got != kUnwritten)
        wrong("out", at, got, "nothing, as the rank does not receive this chunk");
      return;
    }
    if (want.kind == ExpectedChunk::kept) want = {ExpectedChunk::leaf, {at.rank, at.first}};
    if (want.kind == ExpectedChunk::leaf) {
      if (!run_.is_leaf(got, want.one)) wrong("out", at, got, words(want.one));
      return;
    }
    Leaves all;
    if (summed_[got].chunk != at.first && !sums(got, at.first, all))
      return wrong("out", at, got, words(all));
    verification_.order = std::max(verification_.order, summed_[got].order);
  }

  void input(const Slice& at) {
    const Leaf own{at.rank, at.first};
    if (!run_.is_leaf(run_.at(at), own)) wrong("in", at, run_.at(at), words(own) + " unchanged");
  }

  // Returns whether the term is the complete sum of the chunk, and sets `all` to that sum's leaves
  // in rank order. Ranks often share a term, so the result is kept in `summed_`.
  bool sums(TermId id, int chunk, Leaves& all) {
    for (Rank r = 0; r < plan_.world; ++r) all.push_back({r, chunk});
    const Term& term = run_.term(id);
    if (term.leaves != plan_.world) return false;
    const Leaves added = run_.leaves(id);
    Leaves sorted = added;
    std::sort(sorted.begin(), sorted.end());
    if (sorted != all) return false;
    const bool ordered = term.canonical && added == all;
    summed_[id] = {chunk, !ordered             ? Order::other
                          : term.roundings > 1 ? Order::native
                                               : Order::exact};
    return true;
  }

  void wrong(const char* buffer, const Slice& at, TermId got, const std::string& want) {
    const bool few = run_.term(got).leaves <= plan_.world;
    verification_.defect = text("rank ", at.rank, ", ", buffer, "[", at.first, "]: got ",
                                got == kUnwritten ? "unwritten memory"
                                : few ? words(run_.leaves(got))
                                      : text("a sum of more than ", plan_.world, " terms"),
                                ", wanted ", want, " (x", at.rank, "[", at.first, "] is chunk ",
                                at.first, " of rank ", at.rank, "'s input)");
  }

  Collective collective_;
  const Plan& plan_;
  Rank root_;
  bool in_place_;
  SymbolicRun run_;
  std::vector<FoldTerms> summed_;  // [term]
  Verification verification_;
};

// Checks that the final scratch of every rank depends on the initial scratch of all ranks: then no
// rank leaves the barrier before all ranks have entered it.
Verification verify_barrier(const Plan& plan, bool in_place) {
  SymbolicRun run(plan, in_place, Buffer::scratch, FoldOrder::rank);
  for (Rank me = 0; me < plan.world; ++me) {
    std::vector<bool> seen(run.terms()), ranks(plan.world);
    for (int c = 0; c < plan.chunks; ++c) run.mark_ranks(run.at(tmp(me, c)), seen, ranks);
    for (Rank r = 0; r < plan.world; ++r)
      if (!ranks[r])
        return {text("rank ", me, ": can leave the barrier before rank ", r,
                     " has entered; it must wait for all ranks")};
  }
  return {};
}

}  // namespace

Verification verify(Collective collective, const Plan& plan, Rank root, bool in_place,
                    FoldOrder order) {
  check(plan, in_place);
  require(root >= 0 && root < plan.world, "root ", root, " is not a rank of a world of ",
          plan.world);
  if (collective == Collective::barrier) return verify_barrier(plan, in_place);
  if (has_blocks(collective) && plan.chunks % plan.world != 0)
    return {text(name(collective), " has one block per rank, and ", plan.chunks,
                 " chunks cannot be divided evenly among ", plan.world, " blocks")};
  return OrderCheck(collective, plan, root, in_place, order).run();
}

// Finds the folds of as many leaves as there are ranks. Counts leaves
// instead of naming them: in a plan that `verify` accepts no leaf is added twice, so a term with as
// many leaves as ranks has one of each rank.
std::vector<bool> finishes(const Plan& plan, bool in_place) {
  std::vector<int> leaves(cells(plan), kNone);
  const auto is_input = [&](int c) { return c / plan.chunks % kBuffers == 0; };
  const auto count = [&](int c) { return leaves[c] == kNone ? is_input(c) : leaves[c]; };
  std::vector<bool> result(plan.steps.size());
  for (std::size_t n = 0; n < plan.steps.size(); ++n) {
    const Step& step = plan.steps[n];
    std::vector<int> sums(step.dsts.front().count, 0);
    for (const Slice& s : step.srcs)
      each_cell(plan, in_place, s, [&, i = 0](int c) mutable {
        sums[i] = std::min(sums[i] + count(c), plan.world + 1);
        ++i;
      });
    for (const Slice& d : step.dsts)
      each_cell(plan, in_place, d, [&, i = 0](int c) mutable { leaves[c] = sums[i++]; });
    result[n] = step.srcs.size() > 1 &&
                std::all_of(sums.begin(), sums.end(), [&](int sum) { return sum == plan.world; });
  }
  return result;
}

}  // namespace pycollect
