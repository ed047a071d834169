// Runs a rank program once for each piece of the data, as data may be larger than a staging buffer.
// Each chunk has a region of the buffer; a piece is as much of every chunk as its region holds. The
// loop produces rows; the transport owns the buffers, moves the rows and synchronizes the ranks.
#pragma once
#include "call_buffers.h"
#include "transport.h"

namespace pycollect::ipc {

// Returns the bytes of a staging buffer for each of the rank program's regions; the same on all
// ranks of a host. A region of accumulators is `widening` times as large. Throws
// std::invalid_argument if staging buffers of `buffer_bytes` are too small.
std::size_t region_bytes(std::size_t buffer_bytes, const RankProgram& rank_program,
                         std::size_t widening);

// All ranks must cut the data into the same pieces. A piece is limited by the regions of the host
// that has the most of them, so the hosts agree on it.
class ChunkLoop {
 public:
  ChunkLoop(Transport& transport, const CallBuffers& buffers)
      : transport_(transport), buffers_(buffers) {}

  Transport& transport() const { return transport_; }
  // Selects the rank program, for whose chunks the buffers must be divided already. If irregular,
  // ranks do not know each other's sizes, and a piece fills the smallest region of all hosts;
  // otherwise all pieces have about the same size.
  void use(const RankProgram& rank_program, bool irregular);
  // Has the transport prepare the staging buffers that the rank program uses.
  void reserve() const;
  uint32_t pieces() const { return pieces_; }      // number for this rank; peers may need more
  std::size_t piece() const { return piece_; }     // most elements of a chunk in a piece
  void agree(uint32_t pieces, std::size_t piece);  // sets those of all ranks, which have more

  // Enters the first run before the ranks have agreed on it. `fill`: also runs the prologue.
  // Returns the number of finished tasks, for the transport to signal.
  int enter(uint64_t run, bool fill);
  void run(uint64_t first);

  // Returns true if all data for other hosts is ready when the ranks have entered the only run.
  bool packs() const;
  // The data that the rank program's only run sends to another host's rank, or receives from it, in
  // the order of the transfers. `unpack` throws std::invalid_argument if the size differs. After
  // `skip_transfers`, the run makes none.
  void pack(Rank to, std::vector<std::byte>& data);
  void unpack(Rank from, const std::byte* data, std::size_t bytes);
  void skip_transfers() { skips_transfers_ = true; }

 private:
  void run_piece(std::size_t skip);
  void perform(const Instruction& instruction);
  void perform_transfer(const Instruction& instruction);
  void post_receives();
  std::size_t count_of(const Instruction& instruction) const;
  struct Memory {
    std::byte* at;
    std::size_t bytes;
  };
  Memory transferred(const Instruction& instruction) const;
  void wait(const std::vector<Wait>& waits);
  std::byte* own_address(const Operand& o, std::size_t at, std::size_t& n) const;
  std::byte* peer_address(const Operand& o, std::size_t at) const;

  Transport& transport_;
  const CallBuffers& buffers_;
  const RankProgram* rank_program_ = nullptr;
  uint64_t run_ = 0;
  std::size_t stride_ = 0;  // bytes of a region
  bool skips_transfers_ = false;
  bool irregular_ = false;
  std::size_t piece_ = 0;  // most elements of a chunk in one piece
  std::size_t from_ = 0;   // element of each chunk at which the current piece begins
  uint32_t pieces_ = 1;
  bool entered_ = false;
  std::size_t filled_ = 0;  // number of instructions of the first run that `enter` has run
};

}  // namespace pycollect::ipc
