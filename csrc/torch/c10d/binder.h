// Puts the tensors of a call where the executor finds them: contiguous ones are used where they
// lie, others through a copy; parts of several tensors in the order of the plan's blocks. Refuses
// what cannot be served, before anything moves.
#pragma once
#include <c10/util/SmallVector.h>

#include "call.h"

namespace pycollect::dist {

// Dense or strided memory that is really there, on the host or on one of the devices. Throws under
// capture. Returns whether it is on a device.
bool check_operand(const at::Tensor& tensor, Use use, const Label& label, Devices& devices);

struct Seat {  // in the group
  Rank rank;
  int world;
};

// What all requests of a call have in common.
struct Form {
  std::size_t input_blocks, output_blocks;  // none: the rank has no part in that side
  ReduceOp op = ReduceOp::sum;
  Rank root = 0;
  bool in_place = false, irregular = false;
};

class Binder {
 public:
  // The call has its passage, if its tensors are to be on devices.
  Binder(Call& call, Seat seat, const Form& form) : call_(call), seat_(seat), form_(form) {}

  // Where the elements of a tensor are when the call runs.
  shm::Span read(const at::Tensor& tensor, const Label& label);
  shm::Span write(const at::Tensor& tensor, const Label& label);
  shm::Span update(const at::Tensor& tensor, const Label& label);  // both
  // What it has from element `first` on may be the very memory of `place`, which is written: no
  // plan writes an element there before it has been read.
  shm::Span read_beside(const at::Tensor& tensor, const Label& label, const shm::Span& place,
                        std::size_t first = 0);
  // May itself be the very memory of `place`, a part of what is written.
  shm::Span read_inside(const at::Tensor& tensor, const Label& label, const shm::Span& place);
  // Of what `fill` computes from one of the call's tensors, and is like that: on the host when the
  // call runs.
  using Fill = std::function<void(const at::Tensor& into)>;
  shm::Span compute(const at::Tensor& like, Fill fill);

  // There is one request of each dtype, in order of appearance, to which spans are added by block.
  std::size_t request(DType dtype);
  void add_input(std::size_t request, std::size_t block, shm::Span span);
  void add_output(std::size_t request, std::size_t block, shm::Span span);
  // The same of all blocks at once, where each is an equal part.
  void add_whole_input(std::size_t request, const shm::Span& span);
  void add_whole_output(std::size_t request, const shm::Span& span);
  shm::Span part(std::size_t request, const shm::Span& whole, std::size_t block) const;

  // After the last tensor. What is on devices departs.
  void finish();

 private:
  // Without an allocation for what most calls have: one tensor, one block.
  using Block = c10::SmallVector<shm::Span, 1>;
  using Blocks = c10::SmallVector<Block, 1>;
  struct Parts {
    Blocks input, output;
  };
  struct StandIn {  // host memory for a contiguous tensor that is elsewhere
    const std::byte *host, *tensor;
    std::size_t bytes;
  };
  static shm::Side joined(const Blocks& blocks, std::size_t item_bytes);
  void check_together(const at::Tensor& tensor, bool on_device, const Label& label);
  shm::Span enter(const at::Tensor& tensor, bool reads, bool writes);
  shm::Span keep(at::Tensor tensor);
  const std::byte* origin(const std::byte* host) const;
  bool touches_written() const;
  void depart();
  shm::Span bind(const at::Tensor& tensor, const Label& label, bool reads, bool writes);

  Call& call_;
  const Seat seat_;
  const Form form_;
  c10::SmallVector<Parts, 1> parts_;  // [request]
  std::vector<Extent> extents_;
  c10::SmallVector<StandIn, 1> stand_ins_;
};

}  // namespace pycollect::dist
