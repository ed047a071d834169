// Runs a rank's script once for each piece of the data: as much of every chunk at a time as a
// region of a buffer holds. Produces rows, which its transport moves; where buffers are, who moves
// and how ranks wait for each other is the transport's.
#pragma once
#include "sides.h"
#include "transport.h"

namespace pycollect::shm {

// Bytes of a buffer for each of the script's regions; the same on all ranks. Throws
// std::invalid_argument where buffers are too small for the script.
std::size_t region_bytes(std::size_t buffer_bytes, const Script& script);

// Ranks cut alike because they compute alike: from the script's regions and the buffers' size,
// never from a size that only one of them knows.
class ChunkLoop {
 public:
  ChunkLoop(Transport& transport, const Sides& sides) : transport_(transport), sides_(sides) {}

  // The sides have been cut for it. If ranks do not know each other's sizes, a piece is as large as
  // there is room for; otherwise all are alike.
  void use(const Script& script, bool irregular);
  uint32_t pieces() const { return pieces_; }  // as far as this rank knows

  // Enters the first run before the ranks have agreed on it. `fill`: does what fills only the own
  // buffer. Returns how many tasks of the run are finished then, which the transport signals.
  int enter(uint64_t run, bool fill);
  void run(uint64_t first, uint32_t pieces);

 private:
  void run_piece(std::size_t skip);
  void perform(const Move& move);
  void wait(const std::vector<Wait>& waits);
  std::byte* own(const Operand& o, std::size_t at, std::size_t& n) const;
  std::byte* others(const Operand& o, std::size_t at) const;

  Transport& transport_;
  const Sides& sides_;
  const Script* script_ = nullptr;
  uint64_t run_ = 0;
  std::size_t stride_ = 0;  // bytes of a region
  std::size_t piece_ = 0;   // elements
  std::size_t from_ = 0;    // of a chunk: where the piece at hand begins
  uint32_t pieces_ = 1;
  bool entered_ = false;
  std::size_t filled_ = 0;  // moves of the first run that are done
};

}  // namespace pycollect::shm
