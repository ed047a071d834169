// See passes.h. Each pass visits the steps once, and records for each cell (one chunk of one buffer
// of one rank) how the steps that it has placed so far access it.
#include "passes.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "error.h"

namespace pycollect {
namespace {

Plan cut(const Plan& plan, int pieces) {
  Plan result{plan.world, plan.chunks * pieces};
  for (const Step& step : plan.steps)
    for (int i = 0; i < step.dsts.front().count * pieces; ++i) {
      Step part = step;
      for (Slices* side : {&part.dsts, &part.srcs})
        for (Slice& s : *side) s = {s.rank, s.buffer, s.first * pieces + i};
      result.steps.push_back(std::move(part));
    }
  return result;
}

// Adds the copies through host memory. Chunks with the same content have the same value number, so
// content that some host memory already holds is not copied to the host again, even if a step reads
// it from another rank.
class Staging {
 public:
  Staging(const Plan& plan, bool in_place, const MemoryReach& reach)
      : plan_(plan),
        in_place_(in_place),
        reach_(reach),
        result_{plan.world, plan.chunks},
        values_(cells(plan), kOwn),
        needed_(cells(plan)),
        next_value_(cells(plan)) {
    if (reach.shares_staging()) return;  // no copies in, for which unused scratch is room
    has_scratch_.assign(cells(plan), true);
    for (const Step& step : plan.steps)
      for (const Slices* side : {&step.dsts, &step.srcs})
        for (const Slice& s : *side) each(s, [&](int c) { has_scratch_[c] = false; });
  }

  Plan run() {
    for (const Step& step : plan_.steps) {
      if (step.srcs.size() == 1)
        copy(step);
      else
        fold(step);
    }
    return std::move(result_);
  }

 private:
  static constexpr int kOwn = -1;  // a cell's initial value, which has the cell's number

  template <class F>
  void each(const Slice& s, F&& f) const {
    each_cell(plan_, in_place_, s, std::forward<F>(f));
  }
  int value(int cell) const { return values_[cell] == kOwn ? cell : values_[cell]; }
  bool on_host(const Slice& s) const { return s.buffer == Buffer::host || reach_.on_host[s.rank]; }
  bool shared(const Slice& s) const { return reach_.shared[static_cast<int>(s.buffer)]; }
  bool reaches(Rank me, const Slice& s) const {
    return s.buffer == Buffer::host || shared(s) || reach_(me, s.rank);
  }

  bool reaches(Rank me, const Slices& all) const {
    return std::all_of(all.begin(), all.end(), [&](const Slice& s) { return reaches(me, s); });
  }

  Rank executor(const Step& step) const {
    if (!reach_.on_host[step.owner()]) return step.owner();
    for (const Slices* side : {&step.dsts, &step.srcs})
      for (const Slice& s : *side)
        if (!reach_.on_host[s.rank]) return s.rank;
    const auto& hosts = reach_.on_host;
    return static_cast<Rank>(std::find(hosts.begin(), hosts.end(), false) - hosts.begin());
  }

  // A source in host memory is copied by each destination's rank. A source on a device is copied by
  // the step's own rank to all destinations that it reaches.
  void copy(const Step& step) {
    if (reach_.shares_staging()) return copy_near(step);
    const Rank me = executor(step);
    const Slice& src = step.srcs[0];
    const Slice from = reaches(me, src) ? src : copied_out(src);
    Slices mine, theirs;
    for (const Slice& d : step.dsts)
      (on_host(d) || (!on_host(from) && reaches(me, d)) ? mine : theirs).push_back(d);
    if (!mine.empty()) emit(mine, {from}, me);
    if (!theirs.empty()) hand_out(theirs, copied_out(from));
  }

  // Each destination's rank copies if it reaches the source, so that all ranks copy at the same
  // time.
  void copy_near(const Step& step) {
    const Slice& src = step.srcs[0];
    for (const Slice& d : step.dsts) {
      if (reaches(d.rank, src))
        emit({d}, {src}, d.rank);
      else if (reaches(src.rank, d))
        emit({d}, {src}, src.rank);
      else
        emit({d}, {copied_out(src)}, d.rank);
    }
  }

  // The fold reads and writes device memory that its rank reaches; copies do the rest.
  void fold(const Step& step) {
    const Rank me = executor(step);
    Slices srcs, mine, hosts, theirs;
    for (const Slice& s : step.srcs) {
      srcs.push_back(reaches(me, s) ? s : copied_out(s));
      each(srcs.back(), [&](int c) { needed_[c] = true; });
    }
    if (!reach_.shares_staging()) copy_in(me, step.dsts, srcs);
    for (const Slice& d : step.dsts)
      (on_host(d) ? hosts : reaches(me, d) ? mine : theirs).push_back(d);
    if (mine.empty()) mine = {result_place(me, step.dsts.front(), hosts)};
    emit(mine, srcs, me);
    for (const Slice& s : srcs) each(s, [&](int c) { needed_[c] = false; });
    const Slice result = mine.front();
    std::erase(hosts, result);
    if (!hosts.empty()) emit(hosts, {result}, on_host(result) ? me : result.rank);
    if (!theirs.empty()) hand_out(theirs, copied_out(result));
  }

  // Copies a fold's sources in host memory to the device (by copy engine) as far as there is room:
  // at the place of the result, unless that is a source, too, and in scratch at the same chunks.
  void copy_in(Rank me, const Slices& dsts, Slices& srcs) {
    const Slice scratch = tmp(me, dsts.front().first, dsts.front().count);
    Slices places;
    for (const Slice& d : dsts)
      if (d.rank == me && !on_host(d) && !is_among(srcs, d)) places.push_back(d);
    if (is_free(scratch)) places.push_back(scratch);
    auto place = places.begin();
    for (Slice& s : srcs) {
      if (!on_host(s) || place == places.end()) continue;
      emit({*place}, {s}, me);
      each(s, [&](int c) { needed_[c] = false; });
      s = *place++;
    }
  }

  int cell(const Slice& s) const { return first_cell(plan_, in_place_, s); }
  bool is_among(const Slices& slices, const Slice& s) const {
    return std::any_of(slices.begin(), slices.end(),
                       [&](const Slice& other) { return cell(other) == cell(s); });
  }

  // Returns the place of the result of a fold whose only destinations within reach are host memory.
  Slice result_place(Rank me, const Slice& like, const Slices& hosts) const {
    const Slice scratch = tmp(me, like.first, like.count);
    if (!reach_.shares_staging() && is_free(scratch)) return scratch;
    return hosts.empty() ? room(me, like) : hosts.front();
  }

  bool is_free(const Slice& scratch) const {
    bool free = true;
    each(scratch, [&](int c) { free &= has_scratch_[c]; });
    return free;
  }

  void hand_out(const Slices& dsts, const Slice& from) {
    for (const Slice& d : dsts) emit({d}, {from}, d.rank);
  }

  // Returns a slice in host memory with the content of `s`, which it first copies out if needed.
  Slice copied_out(const Slice& s) {
    if (on_host(s) || shared(s)) return s;
    if (const auto known = on_some_host(s)) return *known;
    const Slice out = room(s.rank, s);
    emit({out}, {s}, s.rank);
    return out;
  }

  std::optional<Slice> on_some_host(const Slice& s) const {
    std::vector<int> wanted, there;
    each(s, [&](int c) { wanted.push_back(value(c)); });
    const auto known = lies_at_.find(wanted[0]);
    if (known == lies_at_.end() || known->second.first + s.count > plan_.chunks) return {};
    const Slice at = host(known->second.rank, known->second.first, s.count);
    each(at, [&](int c) { there.push_back(value(c)); });
    return there == wanted ? std::optional(at) : std::nullopt;
  }

  // Returns room in the rank's host memory: at the same chunks as `like`, or at the next ones that
  // the current step no longer needs.
  Slice room(Rank rank, const Slice& like) const {
    for (int shift = 0; shift < plan_.chunks; ++shift) {
      const Slice at = host(rank, (like.first + shift) % plan_.chunks, like.count);
      bool free = at.first + at.count <= plan_.chunks;
      if (free) each(at, [&](int c) { free &= !needed_[c]; });
      if (free) return at;
    }
    throw std::invalid_argument(text("a step needs more of rank ", rank,
                                     "'s memory on the host than it has, ", plan_.chunks,
                                     " chunks; cut the chunks into more pieces"));
  }

  void emit(Slices dsts, Slices srcs, Rank by) {
    std::vector<int> values;
    each(srcs[0], [&](int c) { values.push_back(srcs.size() == 1 ? value(c) : next_value_++); });
    for (const Slice& d : dsts) {
      each(d, [&, i = 0](int c) mutable { values_[c] = values[i++]; });
      if (d.buffer == Buffer::host)
        for (int i = 0; i < d.count; ++i) lies_at_[values[i]] = host(d.rank, d.first + i);
    }
    result_.fold(std::move(dsts), std::move(srcs), by);
  }

  const Plan& plan_;
  bool in_place_;
  const MemoryReach& reach_;
  Plan result_;
  std::vector<int> values_;                 // value numbers; equal for equal content
  std::vector<char> needed_;                // the current step still has to read the cell
  std::vector<bool> has_scratch_;           // [cell]: the original plan does not use it
  std::unordered_map<int, Slice> lies_at_;  // [value]: last host copy; may be overwritten since
  int next_value_;
};

void check(const Plan& plan, const MemoryReach& reach, int pieces) {
  const std::size_t world = plan.world;
  require(pieces >= 1, "a chunk is cut into at least one piece, not ", pieces);
  require(reach.on_host.size() == world && reach.directly.size() == world, "on_host has ",
          reach.on_host.size(), " and directly has ", reach.directly.size(),
          " entries; pass one for each of ", world, " ranks");
  for (const std::vector<bool>& row : reach.directly)
    require(row.size() == world, "a row of directly has ", row.size(),
            " entries; pass one for each of ", world, " ranks");
  require(std::count(reach.on_host.begin(), reach.on_host.end(), false) > 0,
          "all ranks are in host memory; at least one must be on a device to run the plan");
  for (const Step& step : plan.steps)
    for (const Slices* side : {&step.dsts, &step.srcs})
      for (const Slice& s : *side)
        require(s.buffer != Buffer::host, "the plan has been staged already");
}

}  // namespace

MemoryReach MemoryReach::processes(int world, bool input, bool output) {
  MemoryReach reach{std::vector<bool>(world), {}, {input, output, true, true}};
  reach.directly.assign(world, std::vector<bool>(world));
  return reach;
}

Plan stage(const Plan& plan, bool in_place, const MemoryReach& reach, int pieces) {
  check(plan, in_place);
  check(plan, reach, pieces);
  if (pieces == 1 && !reach.shares_staging()) return Staging(plan, in_place, reach).run();
  // Processes have a region of a staging buffer for each chunk, so their slices are single chunks.
  const auto is_single = [](const Step& step) { return step.dsts.front().count == 1; };
  if (pieces == 1 && std::all_of(plan.steps.begin(), plan.steps.end(), is_single))
    return Staging(plan, in_place, reach).run();
  const Plan parts = cut(plan, pieces);
  return Staging(parts, in_place, reach).run();
}

// Slices of a step agree in size, so a staged chunk has the size of its source. An unused chunk has
// the size of the input's.
void cut_host_memory(const Plan& staged, PlanOffsets& offsets) {
  constexpr std::size_t kUnknown = -1;
  std::vector<Sizes> sizes(staged.world, Sizes(staged.chunks, kUnknown));
  auto size = [&](const Slice& s, int i) {
    return s.buffer == Buffer::host ? sizes[s.rank][s.first + i]
                                    : offsets.count({s.rank, s.buffer, s.first + i});
  };
  for (const Step& step : staged.steps)
    for (int i = 0; i < step.dsts.front().count; ++i) {
      std::size_t n = kUnknown;
      for (const Slices* side : {&step.srcs, &step.dsts})
        for (const Slice& s : *side) n = std::min(n, size(s, i));
      for (const Slice& d : step.dsts)
        if (d.buffer == Buffer::host) sizes[d.rank][d.first + i] = n;
    }
  for (Rank r = 0; r < staged.world; ++r) {
    bool same = true;
    for (int c = 0; c < staged.chunks; ++c) {
      const std::size_t bound = offsets.count(host(r, c));
      if (sizes[r][c] == kUnknown) sizes[r][c] = offsets.count(in(r, c));
      same &= sizes[r][c] == bound;
    }
    if (!same) offsets.set(r, Buffer::host, sizes[r]);
  }
  offsets.check(staged);
}

namespace {

constexpr int kNone = -1;

class Merging {
 public:
  Merging(Plan plan, bool in_place)
      : plan_(std::move(plan)),
        in_place_(in_place),
        result_{plan_.world, plan_.chunks},
        writer_(cells(plan_), kNone),
        touched_(cells(plan_), kNone) {
    result_.steps.reserve(plan_.steps.size());
  }

  Plan run() {
    for (Step& step : plan_.steps) {
      step.by = step.owner();
      if (step.srcs.size() == 1)
        std::erase_if(step.dsts, [&](const Slice& d) {
          return same(d, step.srcs[0]) || joins_fold(step.by, d, step.srcs[0]);
        });
      if (!step.dsts.empty()) keep(std::move(step));
    }
    return std::move(result_);
  }

 private:
  template <class F>
  void each(const Slice& s, F&& f) const {
    each_cell(plan_, in_place_, s, std::forward<F>(f));
  }
  int cell(const Slice& s) const { return first_cell(plan_, in_place_, s); }
  bool same(const Slice& a, const Slice& b) const {
    return a.count == b.count && cell(a) == cell(b);
  }
  bool is_among(const Slices& slices, const Slice& s) const {
    return std::any_of(slices.begin(), slices.end(), [&](const Slice& o) { return same(o, s); });
  }

  // If `src` is the result of a fold by the same rank, and no step touched `d` since, adds `d` to
  // the fold's destinations and returns true.
  bool joins_fold(Rank by, const Slice& d, const Slice& src) {
    const int at = writer_[cell(src)];
    if (at == kNone) return false;
    Step& fold = result_.steps[at];
    if (fold.srcs.size() == 1 || fold.owner() != by || !is_among(fold.dsts, src)) return false;
    bool whole = true, free = true;
    each(src, [&](int c) { whole &= writer_[c] == at; });
    each(d, [&](int c) { free &= touched_[c] < at; });
    if (!whole || !free) return false;
    fold.dsts.push_back(d);
    each(d, [&](int c) { writer_[c] = touched_[c] = at; });
    return true;
  }

  void keep(Step step) {
    const int self = static_cast<int>(result_.steps.size());
    for (const Slice& s : step.srcs) each(s, [&](int c) { touched_[c] = self; });
    for (const Slice& d : step.dsts) each(d, [&](int c) { writer_[c] = touched_[c] = self; });
    result_.steps.push_back(std::move(step));
  }

  Plan plan_;
  bool in_place_;
  Plan result_;
  std::vector<int> writer_, touched_;  // the last step of the result
};

bool fills_own(const Step& step) {
  const Rank me = step.owner();
  auto own = [&](const Slice& s) { return s.rank == me; };
  auto kept = [&](const Slice& s) {
    return s.rank == me && (s.buffer == Buffer::scratch || s.buffer == Buffer::host);
  };
  return std::all_of(step.srcs.begin(), step.srcs.end(), own) &&
         std::all_of(step.dsts.begin(), step.dsts.end(), kept);
}

}  // namespace

Plan forward_copies(Plan plan, bool in_place) { return Merging(std::move(plan), in_place).run(); }

Plan hoist_local_copies(Plan plan, bool in_place) {
  std::vector<char> written(cells(plan)), touched(cells(plan));  // by steps that are not moved
  std::vector<bool> moves;                                       // [step]
  for (const Step& step : plan.steps) {
    bool first = fills_own(step);
    auto each = [&](const Slices& slices, auto&& f) {
      for (const Slice& s : slices) each_cell(plan, in_place, s, f);
    };
    each(step.srcs, [&](int c) { first &= !written[c]; });
    each(step.dsts, [&](int c) { first &= !touched[c]; });
    moves.push_back(first);
    if (first) continue;
    each(step.srcs, [&](int c) { touched[c] = true; });
    each(step.dsts, [&](int c) { written[c] = touched[c] = true; });
  }
  Plan result{plan.world, plan.chunks};
  result.steps.reserve(plan.steps.size());
  for (const bool first : {true, false})
    for (std::size_t i = 0; i < plan.steps.size(); ++i)
      if (moves[i] == first) result.steps.push_back(std::move(plan.steps[i]));
  return result;
}

Plan for_processes(const Plan& plan, bool in_place, bool input, bool output) {
  Plan staged = stage(plan, in_place, MemoryReach::processes(plan.world, input, output));
  return hoist_local_copies(forward_copies(std::move(staged), in_place), in_place);
}

}  // namespace pycollect
