// Runs a rank's script once for each piece of the data: as much of every chunk at a time as a
// region of a slot holds.
#pragma once
#include "../cpu/executor.h"
#include "../cpu/step_runner.h"
#include "script.h"
#include "sides.h"

namespace pycollect::shm {

// Of a slot, for each of the script's regions; the same on all ranks. Throws std::invalid_argument
// where slots are too small for the script.
std::size_t region_bytes(const Group& group, const Script& script);

class Pieces {
 public:
  Pieces(Group& group, const Sides& sides, const cpu::RowRunner& row,
         const cpu::ParallelFor& parallel_for)
      : group_(group), sides_(sides), row_(row), parallel_for_(parallel_for) {}

  // The sides have been cut for it. If ranks do not know each other's sizes, a piece is as large as
  // there is room for; otherwise all are alike.
  void use(const Script& script, bool irregular, uint64_t call, bool streamed);
  uint32_t wanted() const { return wanted_; }  // as far as this rank knows

  void lead(uint64_t run);  // fills the own slot for the first piece
  void run(uint64_t first, uint32_t pieces, bool led, const Occasion& occasion);

 private:
  void run_piece(std::size_t skip, const Occasion& occasion);
  void perform(const Move& move);
  void perform(const Move& move, std::size_t begin, std::size_t end);
  void move_row(const Move& move, void** at, std::size_t n) const;
  void wait(const std::vector<Wait>& waits, const Occasion& occasion);
  std::byte* own(const Operand& o, std::size_t at, std::size_t& n) const;
  std::byte* others(const Operand& o, std::size_t at) const;

  Group& group_;
  const Sides& sides_;
  const cpu::RowRunner& row_;
  const cpu::ParallelFor& parallel_for_;
  const Script* script_ = nullptr;
  uint64_t call_ = 0, run_ = 0;
  std::size_t stride_ = 0;  // bytes of a region
  std::size_t piece_ = 0;   // elements
  std::size_t from_ = 0;    // of a chunk: where the piece at hand begins
  uint32_t wanted_ = 1;
  bool streamed_ = false;
};

}  // namespace pycollect::shm
