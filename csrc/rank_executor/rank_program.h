// The rank program: one rank's part of a plan between processes, as a list of instructions, one for
// each task that moves data, with operands and waits. It contains no pointers and no sizes.
#pragma once
#include <compare>
#include <cstdint>
#include <map>
#include <vector>

#include "../plan/program.h"
#include "../plan/registry.h"
#include "request.h"

namespace pycollect::ipc {

// Memory of an operand: an input or output buffer of a rank, or a rank's staging buffer. A staging
// buffer is divided into regions of equal size, one for each chunk that the plan keeps in scratch
// or host memory of that rank.
enum class OperandBuffer : uint8_t { input, output, staging };
struct Operand {
  OperandBuffer where;
  Rank rank;
  int index;  // number of the chunk in an input or output, or of the region in a staging buffer
};

// Maximum number of operands of one instruction, whose addresses are on the stack.
inline constexpr int kMostOperands = 256;

struct Instruction {
  // Destinations in tensors, then destinations in staging buffers, then sources.
  std::vector<Operand> operands = {};
  std::size_t first_operand = 0;  // its number among the operands of all instructions
  int dsts = 0, srcs = 0;         // numbers of all destinations and of all sources
  int in_staging = 0;             // number of destinations in staging buffers, the last of `dsts`
  // The instruction moves as many elements as chunk `chunk` has in `sized_by`, this rank's input or
  // output that is an operand. `staging`: neither is one, and the chunk's size in either buffer
  // counts, which is the same on all ranks unless the request is irregular.
  int chunk = 0;
  OperandBuffer sized_by = OperandBuffer::staging;
  bool finishes = false;  // the last fold of a reduction, where `avg` scales
  // Number of this rank's tasks in a run that are finished when this one is, the run's entry
  // included. The rank signals it as its progress if `signals`: a peer waits for this instruction,
  // or it is the last of the prologue.
  int finished_tasks = 0;
  bool signals = false;
  bool is_plain = false;         // one fold or copy of `cpu::RowRunner` writes all destinations
  std::vector<Wait> waits = {};  // before the instruction

  int operand_count() const { return dsts + srcs; }
};

struct RankProgram {
  std::vector<Instruction> instructions;
  // Length of the prologue, which waits for no rank and fills only this rank's staging buffer.
  std::size_t prologue = 0;
  // The prologues of all ranks are all that writes staging buffers.
  bool fills_at_entry = false;
  std::vector<Wait> exit = {};  // at the end of a run, before the caller may use its tensors
  // A peer waits until this rank has entered the run, or has finished it.
  bool entry_awaited = false, end_awaited = true;
  int chunks = 1;  // number of chunks of the plan
  // Number of regions of every staging buffer: as many as the rank with the most needs, so that all
  // ranks compute the same addresses.
  int regions = 0;
  // Masks of ranks: those to whose staging buffers this rank writes, and those who
  // write to their own.
  uint64_t fills = 0, filled = 0;
  bool exposes_input = false, exposes_output = false;  // peers access the tensor in place
  bool sizes_known = true;  // this rank's own buffers determine the size of every instruction

  bool stages() const { return regions > 0; }  // uses staging buffers
  // Tasks that are finished after the prologue. The first task of a run is its entry.
  int tasks_after_prologue() const {
    return prologue == 0 ? 1 : instructions[prologue - 1].finished_tasks;
  }
};

struct RankProgramKey {
  const Algorithm* algorithm = nullptr;
  int pieces = 0;
  Rank root = 0;
  bool in_place = false;
  bool zero_copy = false;  // every rank can access every rank's input and output
  auto operator<=>(const RankProgramKey&) const = default;
};

RankProgram make_rank_program(RankAndWorld me, const RankProgramKey& key);

// The rank programs that a group has used. They are kept as long as the group.
class RankPrograms {
 public:
  explicit RankPrograms(RankAndWorld me) : me_(me) {}
  const RankProgram& find(const RankProgramKey& key);
  RankAndWorld me() const { return me_; }

 private:
  const RankAndWorld me_;
  std::map<RankProgramKey, const RankProgram> kept_;
};

}  // namespace pycollect::ipc
