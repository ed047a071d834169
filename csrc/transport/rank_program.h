// The rank program: one rank's part of a plan between processes. Lists its tasks in order, each
// with its operands and the ranks it waits for. Built once per plan and rank, then cached; contains
// no pointers and no sizes.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../plan/program.h"
#include "../plan/registry.h"

namespace pycollect::ipc {

enum class OperandBuffer : uint8_t { input, output, staging };
struct Operand {
  OperandBuffer where;
  Rank rank;
  int index;  // the chunk of a buffer, or the region of a staging buffer
};

// Most operands of one instruction: an all-reduce of 64 ranks, directly in the tensors of all.
inline constexpr std::size_t kMostOperands = 2 * 64 + 8;

struct Instruction {
  std::vector<Operand> operands = {};  // destinations (those in staging buffers last), then sources
  int dsts = 0, in_staging = 0;        // number of destinations, and of those in staging buffers
  int chunk = 0;                       // the chunk that gives the number of elements to move
  OperandBuffer like =
      OperandBuffer::staging;  // own buffer with that chunk; OperandBuffer::staging: any buffer
  bool finishes = false;       // a fold that completes the reduction
  bool awaited = false;        // a rank waits for it
  int count = 0;               // tasks of this rank that are finished after it
  std::vector<Wait> waits = {};
};

struct RankProgram {
  std::vector<Instruction> instructions;
  // Length of the prologue, which waits for no rank and fills only this rank's staging buffer.
  std::size_t prologue = 0;
  std::vector<Wait> exit = {};
  bool entry_awaited = false;                          // a rank waits for this rank's entry
  int chunks = 1;                                      // number of chunks of the plan
  int regions = 0;                                     // maximum over the ranks' staging buffers
  bool exposes_input = false, exposes_output = false;  // peers access the tensor in place
  bool sizes_known = true;  // every size follows from a buffer of this rank

  // Tasks that are finished after the prologue. The first task of a run is its entry.
  int tasks_after_prologue() const { return prologue == 0 ? 1 : instructions[prologue - 1].count; }
};

struct RankProgramKey {
  const Algorithm* algorithm = nullptr;
  int world = 0, pieces = 0;
  Rank root = 0, rank = 0;
  bool in_place = false;
  bool zero_copy = false;  // every rank can access every rank's input and output
  bool push_to_all =
      false;  // one step copies a block to all of its destinations (see Reachability)
  bool operator==(const RankProgramKey&) const = default;
};

// Returns a rank program from the cache, or builds it now; it is never freed. Thread-safe.
const RankProgram& rank_program(const RankProgramKey& key);

}  // namespace pycollect::ipc
