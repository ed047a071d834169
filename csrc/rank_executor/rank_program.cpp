// See rank_program.h. Each chunk of scratch and of host memory that a task accesses gets a region
// of a staging buffer, in the same order on all ranks, so that ranks need not exchange offsets.
#include "rank_program.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "../group/segment_layout.h"
#include "../plan/error.h"
#include "../plan/passes.h"
#include "../plan/verify.h"

namespace pycollect::ipc {
namespace {

bool is_staged(const Slice& s) { return s.buffer == Buffer::scratch || s.buffer == Buffer::host; }

// Returns for each step the number of a chunk that has the size of what the step moves. A value in
// host memory may have another chunk's index than the one it was copied from.
std::vector<int> chunks_of_steps(const Plan& plan, bool in_place) {
  std::vector<int> held(cells(plan));  // of host memory: the chunk of the cell's value
  std::vector<int> result;             // [step]
  const auto cell = [&](const Slice& s) {
    int at = 0;
    each_cell(plan, in_place, s, [&](int c) { at = c; });
    return at;
  };
  for (const Step& step : plan.steps) {
    int chunk = -1;
    for (const Slices* side : {&step.srcs, &step.dsts})
      for (const Slice& s : *side)
        if (s.buffer != Buffer::host) chunk = s.first;
    if (chunk == -1) chunk = held[cell(step.srcs[0])];
    for (const Slice& d : step.dsts)
      if (d.buffer == Buffer::host) held[cell(d)] = chunk;
    result.push_back(chunk);
  }
  return result;
}

class RankProgramBuilder {
 public:
  RankProgramBuilder(const Plan& plan, bool in_place, Rank me)
      : plan_(plan),
        in_place_(in_place),
        me_(me),
        chunk_of_(chunks_of_steps(plan, in_place)),
        finishes_(finishes(plan, in_place)),
        program_(lower(plan_, in_place, LevelPolicy::any, kInOutBuffers)),
        region_(cells(plan_), kNone),
        waited_(program_[me].size() + 1) {
    rank_program_.chunks = plan.chunks;
    assign_regions();
    for (const auto& tasks : program_)
      for (const Task& task : tasks)
        for (const Wait w : task.waits)
          if (w.rank == me) waited_[w.count] = true;
  }

  RankProgram run() {
    const auto& tasks = program_[me_];
    require(tasks.size() < std::size_t{1} << kTaskBits, "a rank has ", tasks.size(),
            " tasks; at most ", (1 << kTaskBits) - 1, " are supported");
    for (std::size_t i = 1; i + 1 < tasks.size(); ++i) add(tasks[i], static_cast<int>(i) + 1);
    for (const Instruction& instruction : rank_program_.instructions)
      rank_program_.sizes_known &= instruction.sized_by != OperandBuffer::staging;
    rank_program_.exit = tasks.back().waits;
    rank_program_.entry_awaited = waited_[1];
    rank_program_.prologue = prologue_of(me_);
    set_signals();
    rank_program_.fills_at_entry = fills_at_entry();
    return std::move(rank_program_);
  }

 private:
  static constexpr int kNone = -1;

  void assign_regions() {
    std::vector<int> used(plan_.world);
    for (const Step& step : plan_.steps) {
      const bool mine = step.owner() == me_;
      for (const Slices* side : {&step.dsts, &step.srcs})
        for (const Slice& s : *side) {
          if (is_staged(s)) {
            const bool own = side == &step.dsts && step.owner() == s.rank;
            if (own) rank_program_.filled |= uint64_t{1} << s.rank;
            int& region = region_[cell(s)];
            if (region == kNone) region = used[s.rank]++;
          } else if (s.rank == me_ && !mine) {
            (s.buffer == Buffer::input ? rank_program_.exposes_input
                                       : rank_program_.exposes_output) = true;
          }
        }
    }
    rank_program_.regions = *std::ranges::max_element(used);
  }

  int cell(const Slice& s) const {
    int at = 0;
    each_cell(plan_, in_place_, s, [&](int c) { at = c; });
    return at;
  }

  void add(const Task& task, int count) {
    const Step& step = plan_.steps[task.step];
    Instruction instruction{.dsts = static_cast<int>(step.dsts.size()),
                            .srcs = static_cast<int>(step.srcs.size()),
                            .chunk = chunk_of_[task.step],
                            .finishes = finishes_[task.step],
                            .finished_tasks = count,
                            .signals = waited_[count],
                            .waits = task.waits};
    Slices slices = step.dsts;
    const auto first_staged =
        std::stable_partition(slices.begin(), slices.end(), std::not_fn(is_staged));
    instruction.in_staging = static_cast<int>(slices.end() - first_staged);
    slices.insert(slices.end(), step.srcs.begin(), step.srcs.end());
    for (const Slice& s : slices) {
      instruction.operands.push_back(operand(s));
      if (is_staged(s) || s.rank != me_) continue;
      instruction.chunk = s.first;
      instruction.sized_by = instruction.operands.back().where;
    }
    for (int i = instruction.dsts - instruction.in_staging; i < instruction.dsts; ++i)
      rank_program_.fills |= uint64_t{1} << instruction.operands[i].rank;
    instruction.is_plain = instruction.in_staging == 0 || instruction.srcs == 1 ||
                           instruction.in_staging == instruction.dsts;
    instruction.first_operand = operands_;
    operands_ += instruction.operands.size();
    require(instruction.operand_count() <= kMostOperands, "a step has ",
            instruction.operand_count(), " slices; at most ", kMostOperands,
            " are supported between processes");
    rank_program_.instructions.push_back(std::move(instruction));
  }

  // The prologue signals once, and the end of a run signals its last instruction, too.
  void set_signals() {
    auto& all = rank_program_.instructions;
    if (all.empty()) return;
    rank_program_.end_awaited = all.back().signals;
    for (std::size_t i = 0; i < rank_program_.prologue; ++i)
      all[i].signals = i + 1 == rank_program_.prologue;
    if (all.size() > rank_program_.prologue && rank_program_.exit.empty())
      all.back().signals = false;
  }

  Operand operand(const Slice& s) const {
    if (is_staged(s)) return {OperandBuffer::staging, s.rank, region_[cell(s)]};
    return {s.buffer == Buffer::input ? OperandBuffer::input : OperandBuffer::output, s.rank,
            s.first};
  }

  // Returns how many tasks of the rank, after the first, only fill its own staging buffer from its
  // own memory, and wait for no rank.
  std::size_t prologue_of(Rank r) const {
    const auto own = [&](const Slice& s) { return s.rank == r; };
    const auto fills = [&](const Task& task) {
      const Step& step = plan_.steps[task.step];
      return task.waits.empty() && std::ranges::all_of(step.dsts, is_staged) &&
             std::ranges::all_of(step.dsts, own) && std::ranges::all_of(step.srcs, own);
    };
    const auto& tasks = program_[r];
    std::size_t n = 0;
    while (n + 2 < tasks.size() && fills(tasks[n + 1])) ++n;
    return n;
  }

  bool fills_at_entry() const {
    for (Rank r = 0; r < plan_.world; ++r) {
      const auto& tasks = program_[r];
      for (std::size_t i = 1 + prologue_of(r); i + 1 < tasks.size(); ++i)
        if (std::ranges::any_of(plan_.steps[tasks[i].step].dsts, is_staged)) return false;
    }
    return true;
  }

  const Plan& plan_;
  bool in_place_;
  Rank me_;
  const std::vector<int> chunk_of_;   // [step]
  const std::vector<bool> finishes_;  // [step]
  Program program_;
  std::vector<int> region_;   // [cell]
  std::size_t operands_ = 0;  // of the instructions so far
  std::vector<bool> waited_;  // [count]: a rank waits for this many tasks of this rank
  RankProgram rank_program_;
};

}  // namespace

RankProgram make_rank_program(RankAndWorld me, const RankProgramKey& key) {
  const Plan plan = (*key.algorithm)({me.world, key.root, key.pieces});
  const Plan staged = for_processes(plan, key.in_place, key.zero_copy, key.zero_copy);
  return RankProgramBuilder(staged, key.in_place, me.rank).run();
}

const RankProgram& RankPrograms::find(const RankProgramKey& key) {
  const auto found = kept_.find(key);
  if (found != kept_.end()) return found->second;
  return kept_.emplace(key, make_rank_program(me_, key)).first->second;
}

}  // namespace pycollect::ipc
