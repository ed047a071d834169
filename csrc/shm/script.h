// One rank's part of a plan between processes: its tasks in order, each with where its operands lie
// and whom it waits for. Made once per plan and rank and kept; knows no pointers and no sizes.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../plan/program.h"
#include "../plan/registry.h"

namespace pycollect::shm {

enum class Where : uint8_t { input, output, slot };
struct Operand {
  Where where;
  Rank rank;
  int index;  // the chunk of a buffer, or the region of a slot
};

// Of one task: an all-reduce of the most ranks, in the tensors of all of them.
inline constexpr std::size_t kMostOperands = 2 * 64 + 8;

struct Move {
  std::vector<Operand> operands = {};  // destinations, those in slots last, then sources
  int dsts = 0, in_slots = 0;          // how many of the destinations
  int chunk = 0;                       // it moves as many elements as this one has
  Where like = Where::slot;            // in this own buffer; Where::slot: in any
  bool finishes = false;               // a fold after which nothing is added
  bool announced = false;              // does anybody wait for it?
  int count = 0;                       // of this rank's tasks that are finished with it
  std::vector<Wait> waits = {};
};

struct Script {
  std::vector<Move> moves;
  std::size_t leading = 0;  // moves that only fill the own slot, and wait for nobody
  std::vector<Wait> exit = {};
  bool entered = false;                            // does anybody wait for the entry?
  int chunks = 1;                                  // of the plan
  int regions = 0;                                 // that the rank with the most needs in its slot
  bool lends_input = false, lends_output = false;  // do others touch them where they are?
  bool measured = true;                            // is every move's size known from an own buffer?

  // Of the tasks, the first is the entry.
  int led() const { return leading == 0 ? 1 : moves[leading - 1].count; }
};

struct ScriptKey {
  const Algorithm* algorithm = nullptr;
  int world = 0, pieces = 0;
  Rank root = 0, rank = 0;
  bool in_place = false;
  bool open = false;     // everybody reaches everybody's input and output
  bool at_once = false;  // who has a block copies it to all that are to have it (see Reach)
  bool operator==(const ScriptKey&) const = default;
};

// From the cache, or made now; it stays for ever. Thread-safe.
const Script& script(const ScriptKey& key);

}  // namespace pycollect::shm
