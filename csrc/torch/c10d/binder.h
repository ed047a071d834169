// Binds the tensors of a call to addresses for the executor: contiguous tensors in place, others
// through a copy, and parts of several tensors in the order of the plan's blocks. Throws for
// unsupported tensors before any data moves.
#pragma once
#include "group_call.h"

namespace pycollect::dist {

// Requires dense or strided tensors with real memory, on the host or on a supported device. Throws
// under stream capture. Returns whether the tensor is on a device.
bool check_operand(const at::Tensor& tensor, AccessMode use, const ArgumentName& label,
                   DeviceOps& devices);

// Returns the label of `all[i]`, with its index if the list has several tensors.
ArgumentName label_of(const GroupCall& call, const char* list, at::TensorList all, std::size_t i);

using ipc::RankAndWorld;

enum class Side { input, output };

// Properties that all requests of a call share.
struct RequestShape {
  std::size_t input_blocks = 0, output_blocks = 0;  // 0: this rank does not use the buffer
  ReduceOp op = ReduceOp::sum;
  Rank root = 0;
  bool in_place = false, irregular = false;
};

class Binder {
 public:
  // Sets `call.staging` if the first tensor is on a device; then all others must be, too.
  Binder(GroupCall& call, RankAndWorld me, const RequestShape& shape)
      : call_(call), me_(me), shape_(shape) {}

  struct Bound {
    ipc::BufferSpan memory;  // where the tensor's elements are when the call runs
    std::size_t extent;      // number of the tensor's extent
    bool contiguous;
  };
  // Binds a tensor that the call reads, writes, or both.
  Bound bind(const at::Tensor& tensor, const ArgumentName& label, bool reads, bool writes);
  // Lets `block`, this rank's block on one side of the call, be the same memory as its block in
  // `all`, which has the blocks of `parts` ranks or is itself that block. One of both is read, the
  // other one written: no plan writes an element there before it has been read.
  void share(const Bound& block, const Bound& all, int parts);
  // Binds a temporary with the properties of `like`, which `fill` computes from one of the call's
  // tensors. For host tensors, `fill` runs when the call runs.
  using Fill = std::function<void(const at::Tensor& into)>;
  ipc::BufferSpan compute(const at::Tensor& like, Fill fill);

  // Returns the index of the request for the tensor's dtype; requests are in order of first
  // appearance. Any dtype that can be moved is accepted.
  std::size_t request(const at::Tensor& tensor, const ArgumentName& label);
  void add(Side side, std::size_t request, std::size_t block, const ipc::BufferSpan& memory);
  // Adds a buffer that holds the blocks of all ranks, of these sizes.
  void add_all(Side side, std::size_t request, ipc::BufferSpan memory, const Sizes& blocks);

  // Ends binding, after the last tensor. Starts the copies of device tensors into staging.
  void finish();

 private:
  struct BlockPart {  // a part of a block
    std::size_t request, block;
    ipc::BufferSpan memory;
  };
  // Inline storage for the most common call, with one tensor and one block.
  using BlockParts = c10::SmallVector<BlockPart, 1>;
  ipc::CallBuffer join(Side side, std::size_t request, std::size_t blocks);
  ipc::BufferSpan stage(const at::Tensor& tensor, bool reads, bool writes);
  ipc::BufferSpan keep(at::Tensor tensor);
  bool overlaps_earlier_writes() const;
  void begin_copy_in();

  GroupCall& call_;
  const RankAndWorld me_;
  const RequestShape shape_;
  std::array<BlockParts, 2> parts_;  // [side]
  c10::SmallVector<ArgumentExtent, 4> extents_;
};

}  // namespace pycollect::dist
