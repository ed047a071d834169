// Runs a rank program on the group's segment, once for each piece of the data, as data may be
// larger than a staging buffer: waits for the progress counters of other ranks, copies and folds
// with the rank's own threads, and advances its own counter.
#pragma once
#include <array>
#include <vector>

#include "../cpu/executor.h"
#include "prepared_request.h"

namespace pycollect::ipc {

class ProgramRun {
 public:
  ProgramRun(Group& group, cpu::ParallelFor parallel_for)
      : group_(group),
        parallel_for_(std::move(parallel_for)),
        bases_(OperandPlace::of_rank(group.world(), OperandBuffer::staging)) {}

  // Begins a call, and selects the program that stages all data. The request, `prepared` and the
  // context must live until the call has ended.
  void begin(const PreparedRequest& prepared, const CollectiveRequest& request,
             const OpContext& context);
  // Runs the prologue of the first run, before the ranks have agreed on the call. Returns the
  // number of finished tasks, to be published.
  int fill(uint64_t run);
  // Selects the zero-copy program instead, or the pieces into which all ranks cut the data. These
  // become smaller, so that the prologue, if it has run, has filled at least the first.
  void use_tensors();
  void cut(const Pieces& of_all) {
    const bool irregular = prepared_->request.irregular;
    if (irregular || of_all.count > pieces_.count)
      pieces_ = common_pieces(*bound_, of_all, prepared_->item(), irregular);
  }
  void run(uint64_t first);  // all pieces

  const Pieces& pieces() const { return pieces_; }
  // The current piece in rank 0's staging buffer; null: it is elsewhere.
  const std::byte* staged() const { return staged_; }

 private:
  void begin_piece(uint64_t run, std::size_t from);
  void run_piece(std::size_t skip);
  void perform(std::size_t i, const Instruction& instruction);
  void move(const Instruction& instruction, std::size_t n) const;
  void move_parallel(const Instruction& instruction, std::size_t n, std::size_t element) const;
  void move_spans(const Instruction& instruction, std::size_t begin, std::size_t end) const;
  template <int kMost>
  void move_spans(const Instruction& instruction, std::size_t begin, std::size_t end) const;
  void fold(const Instruction& instruction, void* const* at, std::size_t count) const;
  void fold_and_copy(const Instruction& instruction, cpu::Pointers to, cpu::Pointers from,
                     std::size_t count) const;
  std::byte* find(const OperandPlace& place, std::size_t at, std::size_t& n) const;
  std::byte* address(const OperandPlace& place, std::size_t at, std::size_t& n) const;
  std::size_t count_of(std::size_t i) const {  // elements in the current piece
    const std::size_t all = bound_->counts[i];
    return all <= from_ ? 0 : std::min(pieces_.elements, all - from_);
  }
  void wait(const std::vector<Wait>& waits) {
    for (const Wait w : waits) group_.await(w.rank, at_run(run_) + w.count, *context_);
  }

  Group& group_;
  const cpu::ParallelFor parallel_for_;
  // The members below belong to the current call.
  const PreparedRequest* prepared_ = nullptr;
  const BoundProgram* bound_ = nullptr;
  const OpContext* context_ = nullptr;
  std::array<const CallBuffer*, 2> buffers_ = {};  // input and output
  bool is_scattered_ = false;                      // one of them has several spans (IoVec)
  // [buffer][span]: bytes from the buffer's beginning to the span's end, if scattered.
  std::array<std::vector<std::size_t>, 2> ends_ = {};
  Pieces pieces_ = {};
  uint64_t run_ = 0;
  std::vector<std::byte*> bases_;  // see OperandPlace; of the current piece
  std::size_t from_ = 0;           // element of each chunk at which the current piece begins
  std::size_t filled_ = 0;         // number of instructions of the first run that `fill` has run
  bool in_tensors_ = false;
  const std::byte* staged_ = nullptr;
  bool non_temporal_ = false;  // the stores into staging buffers
  bool is_trial_ = false;      // see StoreChoice
  Clock::duration took_ = {};  // by a trial so far
};

}  // namespace pycollect::ipc
