// See chunk_loop.h. The path of a small call allocates no memory.
#include "chunk_loop.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

constexpr std::size_t kLine = 64;

std::size_t ceil_div(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

}  // namespace

std::size_t region_bytes(std::size_t buffer_bytes, const RankProgram& rank_program,
                         std::size_t widening) {
  const auto n =
      std::max<std::size_t>(rank_program.regions + rank_program.partial_regions * widening, 1);
  if (n == 1 && buffer_bytes >= kLine) return buffer_bytes / kLine * kLine;
  require(buffer_bytes / n >= kLine, "staging buffers of ", buffer_bytes,
          " bytes are too small for ", n, " chunks; set buffer_bytes to at least ", n * kLine);
  return buffer_bytes / n / kLine * kLine;
}

void ChunkLoop::use(const RankProgram& rank_program, bool irregular) {
  rank_program_ = &rank_program;
  irregular_ = irregular;
  pieces_ = 1;
  stride_ = 0;
  piece_ = std::numeric_limits<std::size_t>::max();
  if (!rank_program.stages() && (!irregular || transport_.hosts() == nullptr)) return;
  stride_ = region_bytes(transport_.buffer_bytes(), rank_program, buffers_.widening());
  piece_ = stride_ / buffers_.item();
  const std::size_t largest = buffers_.largest();
  if (largest > piece_) agree(static_cast<uint32_t>(ceil_div(largest, piece_)), piece_);
}

void ChunkLoop::reserve() const {
  if (stride_ == 0) return;
  const std::size_t regions = rank_program_->regions, widening = buffers_.widening();
  const std::size_t bytes =
      std::min(std::min(piece_, buffers_.largest()) * buffers_.item(), stride_);
  const Group::StagingRegions own{.count = regions, .stride = stride_, .bytes = bytes};
  transport_.reserve(*rank_program_, own, irregular_);
  if (rank_program_->partial_regions == 0) return;
  transport_.reserve(*rank_program_,
                     {.begin = regions * stride_,
                      .count = static_cast<std::size_t>(rank_program_->partial_regions),
                      .stride = widening * stride_,
                      .bytes = widening * bytes},
                     irregular_);
}

// The pieces become smaller, so that the prologue, if it has run, has filled at least the first.
void ChunkLoop::agree(uint32_t pieces, std::size_t piece) {
  if (irregular_) {
    piece_ = std::min(piece_, piece);
  } else if (pieces > pieces_) {
    const std::size_t per_line = kLine / buffers_.item();
    piece_ = ceil_div(ceil_div(buffers_.largest(), pieces), per_line) * per_line;
  }
  pieces_ = std::max(pieces_, pieces);
}

int ChunkLoop::enter(uint64_t run, bool fill) {
  run_ = run;
  entered_ = true;
  if (!fill) return 1;  // the first task of every run is its entry
  while (filled_ < rank_program_->prologue) perform(rank_program_->instructions[filled_++]);
  return rank_program_->tasks_after_prologue();
}

void ChunkLoop::run(uint64_t first) {
  // The end of a call's last run need not be signalled unless a peer waits for the last
  // instruction: the next call's fingerprint signals it, too.
  const bool awaited =
      rank_program_->instructions.empty() || rank_program_->instructions.back().awaited;
  for (uint32_t k = 0; k < pieces_; ++k) {
    run_ = first + k;
    from_ = k * piece_;
    if (!std::exchange(entered_, false)) {
      if (stride_ > 0) transport_.wait_for_previous(run_);
      // The first run always signals its entry, which also marks all earlier calls as finished.
      if (k == 0 || rank_program_->entry_awaited) transport_.signal(at_run(run_) + 1);
    }
    const bool transfers = !rank_program_->transfers.empty() && !skips_transfers_;
    if (transfers) post_receives();
    run_piece(std::exchange(filled_, 0));
    if (transfers) transport_.await_sends();
    const bool signals = k + 1 < pieces_ || awaited;
    if (signals) transport_.signal(at_run(run_ + 1));
    if (k + 1 == pieces_) transport_.end(at_run(run_ + 1), signals);
  }
}

void ChunkLoop::run_piece(std::size_t skip) {
  for (std::size_t i = skip; i < rank_program_->instructions.size(); ++i) {
    const Instruction& instruction = rank_program_->instructions[i];
    wait(instruction.waits);
    perform(instruction);
    const bool last = i + 1 == rank_program_->instructions.size() && rank_program_->exit.empty();
    if (i + 1 == rank_program_->prologue ||
        (i >= rank_program_->prologue && instruction.awaited && !last))
      transport_.signal(at_run(run_) + instruction.finished_tasks);
  }
  wait(rank_program_->exit);
}

void ChunkLoop::wait(const std::vector<Wait>& waits) {
  for (const Wait w : waits) transport_.wait(w.rank, at_run(run_) + w.count);
}

// Returns the number of elements that the instruction moves in the current piece.
std::size_t ChunkLoop::count_of(const Instruction& instruction) const {
  const std::size_t size = buffers_.size(instruction);
  return size <= from_ ? 0 : std::min(piece_, size - from_);
}

void ChunkLoop::perform(const Instruction& instruction) {
  const std::size_t n = count_of(instruction);
  if (n == 0) return;
  if (instruction.transfer) return perform_transfer(instruction);
  Rows& rows = transport_.rows();
  rows.clear(instruction);
  for (std::size_t begin = 0; begin < n;) {
    std::size_t count = n - begin;
    void** const at = rows.open();
    for (std::size_t i = 0; i < instruction.operands.size(); ++i) {
      const Operand& o = instruction.operands[i];
      const bool is_own = !is_staging(o.where) && o.rank == transport_.rank();
      at[i] = is_own ? own_address(o, begin, count) : peer_address(o, begin);
    }
    rows.close(begin += count);
  }
  transport_.launch(rows);
}

ChunkLoop::Memory ChunkLoop::transferred(const Instruction& instruction) const {
  const Operand& moved = instruction.operands[0];
  const std::size_t item =
      moved.where == OperandBuffer::partial ? buffers_.accumulator_item() : buffers_.item();
  return {peer_address(moved, 0), count_of(instruction) * item};
}

// Receives begin before the first instruction of a piece, so that no sender waits for this rank.
void ChunkLoop::post_receives() {
  for (const int i : rank_program_->transfers) {
    const Instruction& instruction = rank_program_->instructions[i];
    if (!instruction.transfer->early || count_of(instruction) == 0) continue;
    const Memory to = transferred(instruction);
    transport_.receive(*instruction.transfer, to.at, to.bytes);
  }
}

void ChunkLoop::perform_transfer(const Instruction& instruction) {
  if (skips_transfers_) return;
  const HostTransfer& transfer = *instruction.transfer;
  const Memory moved = transferred(instruction);
  if (transfer.direction == HostTransfer::Direction::send)
    return transport_.send(transfer, moved.at, moved.bytes);
  if (!transfer.early) transport_.receive(transfer, moved.at, moved.bytes);
  transport_.await_receive(transfer);
}

bool ChunkLoop::packs() const { return rank_program_->packs && pieces_ == 1; }

void ChunkLoop::pack(Rank to, std::vector<std::byte>& data) {
  for (const int i : rank_program_->transfers) {
    const Instruction& instruction = rank_program_->instructions[i];
    const HostTransfer& transfer = *instruction.transfer;
    if (transfer.direction != HostTransfer::Direction::send || transfer.peer != to) continue;
    const Memory from = transferred(instruction);
    data.insert(data.end(), from.at, from.at + from.bytes);
  }
}

void ChunkLoop::unpack(Rank from, const std::byte* data, std::size_t bytes) {
  for (const int i : rank_program_->transfers) {
    const Instruction& instruction = rank_program_->instructions[i];
    const HostTransfer& transfer = *instruction.transfer;
    if (transfer.direction != HostTransfer::Direction::receive || transfer.peer != from) continue;
    const Memory to = transferred(instruction);
    require(to.bytes <= bytes, "rank ", from, " sent a shorter message than its call needs");
    std::memcpy(to.at, data, to.bytes);
    data += to.bytes;
    bytes -= to.bytes;
  }
  require(bytes == 0, "rank ", from, " sent a longer message than its call needs");
}

// Returns the address of an element of this rank's buffer, and limits `n` to the elements before
// the next tensor.
std::byte* ChunkLoop::own_address(const Operand& o, std::size_t at, std::size_t& n) const {
  const SegmentList& memory = buffers_.memory(o.where);
  const std::size_t element = buffers_.begin(o) + from_ + at;
  if (memory.is_contiguous()) return memory.base() + element * buffers_.item();
  const SegmentList::SegmentPosition piece = memory.find(element);
  n = std::min(n, piece.count);
  return piece.at;
}

std::byte* ChunkLoop::peer_address(const Operand& o, std::size_t at) const {
  if (o.where == OperandBuffer::staging)
    return transport_.buffer(o.rank, run_) + o.index * stride_ + at * buffers_.item();
  if (o.where == OperandBuffer::partial)
    return transport_.buffer(o.rank, run_) +
           (rank_program_->regions + o.index * buffers_.widening()) * stride_ +
           at * buffers_.accumulator_item();
  return transport_.tensor(o.rank, o.where) + (buffers_.begin(o) + from_ + at) * buffers_.item();
}

}  // namespace pycollect::ipc
