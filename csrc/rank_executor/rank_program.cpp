// See rank_program.h. Each chunk of scratch and of host memory that a task accesses gets a region
// of a staging buffer, in the same order on all ranks, so that ranks need not exchange offsets.
#include "rank_program.h"

#include <algorithm>
#include <array>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "../group/segment_layout.h"
#include "../plan/error.h"
#include "../plan/passes.h"
#include "../plan/verify.h"

namespace pycollect::ipc {
namespace {

bool is_staged(const Slice& s) { return s.buffer == Buffer::scratch || s.buffer == Buffer::host; }

class RankProgramBuilder {
 public:
  RankProgramBuilder(const Plan& plan, bool in_place, Rank me)
      : plan_(plan),
        in_place_(in_place),
        me_(me),
        program_(lower(plan, in_place, LevelPolicy::any, kInOutBuffers)),
        finishes_(finishes(plan, in_place)),
        region_(cells(plan), kNone),
        waited_(program_[me].size() + 1) {
    rank_program_.chunks = plan.chunks;
    assign_regions();
    find_chunks();
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
    rank_program_.exit = tasks.back().waits;
    rank_program_.entry_awaited = waited_[1];
    while (rank_program_.prologue < rank_program_.instructions.size() &&
           in_prologue(rank_program_.instructions[rank_program_.prologue]))
      ++rank_program_.prologue;
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
            int& region = region_[cell(s)];
            if (region == kNone) region = used[s.rank]++;
          } else if (s.rank == me_ && !mine) {
            (s.buffer == Buffer::input ? rank_program_.exposes_input
                                       : rank_program_.exposes_output) = true;
          }
        }
    }
    rank_program_.regions = *std::max_element(used.begin(), used.end());
  }

  // Finds the chunk that determines each step's size. A value in host memory may have another
  // chunk's index; its size is that of the chunk from which it was copied or folded.
  void find_chunks() {
    std::vector<int> held(cells(plan_), 0);  // [cell] of host memory: the chunk of its value
    for (const Step& step : plan_.steps) {
      int chunk = kNone;
      for (const Slices* side : {&step.srcs, &step.dsts})
        for (const Slice& s : *side)
          if (s.buffer != Buffer::host) chunk = s.first;
      if (chunk == kNone) chunk = held[cell(step.srcs[0])];
      for (const Slice& d : step.dsts)
        if (d.buffer == Buffer::host) held[cell(d)] = chunk;
      chunk_.push_back(chunk);
    }
  }

  int cell(const Slice& s) const {
    int at = 0;
    each_cell(plan_, in_place_, s, [&](int c) { at = c; });
    return at;
  }

  void add(const Task& task, int count) {
    const Step& step = plan_.steps[task.step];
    Instruction instruction{.dsts = static_cast<int>(step.dsts.size()),
                            .chunk = chunk_[task.step],
                            .finishes = finishes_[task.step],
                            .awaited = waited_[count],
                            .finished_tasks = count,
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
    require(instruction.operands.size() <= kMostOperands, "a step has ",
            instruction.operands.size(), " slices; at most ", kMostOperands,
            " are supported between processes");
    rank_program_.sizes_known &= instruction.sized_by != OperandBuffer::staging;
    rank_program_.instructions.push_back(std::move(instruction));
  }

  Operand operand(const Slice& s) const {
    if (is_staged(s)) return {OperandBuffer::staging, s.rank, region_[cell(s)]};
    return {s.buffer == Buffer::input ? OperandBuffer::input : OperandBuffer::output, s.rank,
            s.first};
  }

  bool in_prologue(const Instruction& instruction) const {
    auto own = [&](const Operand& o) { return o.rank == me_; };
    auto in_own_staging = [&](const Operand& o) {
      return own(o) && o.where == OperandBuffer::staging;
    };
    const auto first = instruction.operands.begin();
    return instruction.waits.empty() &&
           std::all_of(first, first + instruction.dsts, in_own_staging) &&
           std::all_of(first, instruction.operands.end(), own);
  }

  const Plan& plan_;
  bool in_place_;
  Rank me_;
  Program program_;
  std::vector<bool> finishes_;
  std::vector<int> region_;   // [cell]
  std::vector<int> chunk_;    // [step]: the chunk that determines its size
  std::vector<bool> waited_;  // [count]: a rank waits for this many tasks of this rank
  RankProgram rank_program_;
};

struct RankProgramHash {
  std::size_t operator()(const RankProgramKey& k) const {
    std::size_t h = std::hash<const void*>()(k.algorithm);
    for (int part :
         {k.world, k.pieces, k.root, k.rank, 4 * k.push_to_all + 2 * k.in_place + k.zero_copy})
      h = h * 1000003 + static_cast<std::size_t>(part);  // any large odd number
    return h;
  }
};

// The cache of rank programs. Never destroyed: threads that outlive main may still use it.
struct RankProgramCache {
  std::shared_mutex mutex;
  std::unordered_map<RankProgramKey, std::unique_ptr<const RankProgram>, RankProgramHash> kept;
};
RankProgramCache& cache() {
  static RankProgramCache& it = *new RankProgramCache;
  return it;
}

}  // namespace

const RankProgram& rank_program(const RankProgramKey& key) {
  {
    const std::shared_lock lock(cache().mutex);
    const auto found = cache().kept.find(key);
    if (found != cache().kept.end()) return *found->second;
  }
  const Plan plan = (*key.algorithm)({key.world, key.root, key.pieces});
  const Plan staged =
      for_processes(plan, key.in_place, key.zero_copy, key.zero_copy, key.push_to_all);
  auto made =
      std::make_unique<const RankProgram>(RankProgramBuilder(staged, key.in_place, key.rank).run());
  const std::unique_lock lock(cache().mutex);
  return *cache().kept.emplace(key, std::move(made)).first->second;
}

}  // namespace pycollect::ipc
