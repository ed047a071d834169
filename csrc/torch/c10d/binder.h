// Binds the tensors of a call to addresses for the executor: contiguous tensors in place, others
// through a copy, and parts of several tensors in the order of the plan's blocks. Throws for
// unsupported tensors before any data moves.
#pragma once
#include <c10/util/SmallVector.h>

#include "group_call.h"

namespace pycollect::dist {

// Requires dense or strided tensors with real memory, on the host or on a supported device. Throws
// under stream capture. Returns whether the tensor is on a device.
bool check_operand(const at::Tensor& tensor, AccessMode use, const ArgumentName& label,
                   DeviceOps& devices);

struct RankAndWorld {  // a rank's position in the group
  Rank rank;
  int world;
};

// Properties that all requests of a call share.
struct RequestTemplate {
  std::size_t input_blocks, output_blocks;  // 0: this rank does not use the buffer
  ReduceOp op = ReduceOp::sum;
  Rank root = 0;
  bool in_place = false, irregular = false;
};

class Binder {
 public:
  // `call.staging` must be set if the call's tensors are to be on devices.
  Binder(GroupCall& call, RankAndWorld me, const RequestTemplate& form)
      : call_(call), me_(me), form_(form) {}

  // Bind a tensor that the call reads, writes, or both (`update`). Return where the tensor's
  // elements are when the call runs.
  ipc::BufferSegment read(const at::Tensor& tensor, const ArgumentName& label);
  ipc::BufferSegment write(const at::Tensor& tensor, const ArgumentName& label);
  ipc::BufferSegment update(const at::Tensor& tensor, const ArgumentName& label);
  // Like read(), but the elements from `first` on may be the same memory as `place`, which is
  // written: no plan writes an element there before it has been read.
  ipc::BufferSegment read_aliasing(const at::Tensor& tensor, const ArgumentName& label,
                                   const ipc::BufferSegment& place, std::size_t first = 0);
  // Like read(), but the whole tensor may be the same memory as `place`, a part of a written
  // tensor.
  ipc::BufferSegment read_whole_aliasing(const at::Tensor& tensor, const ArgumentName& label,
                                         const ipc::BufferSegment& place);
  // Binds a temporary with the properties of `like`, which `fill` computes from one of the call's
  // tensors. For host tensors, `fill` runs when the call runs.
  using Fill = std::function<void(const at::Tensor& into)>;
  ipc::BufferSegment compute(const at::Tensor& like, Fill fill);

  // Returns the index of the request for the tensor's dtype; requests are in order of first
  // appearance. Any dtype that can be moved is accepted.
  std::size_t request(const at::Tensor& tensor, const ArgumentName& label);
  void add_input(std::size_t request, std::size_t block, ipc::BufferSegment span);
  void add_output(std::size_t request, std::size_t block, ipc::BufferSegment span);
  // Add a buffer that holds the equal blocks of all ranks.
  void add_whole_input(std::size_t request, const ipc::BufferSegment& span);
  void add_whole_output(std::size_t request, const ipc::BufferSegment& span);
  ipc::BufferSegment part(std::size_t request, const ipc::BufferSegment& whole,
                          std::size_t block) const;

  // Ends binding, after the last tensor. Starts the copies of device tensors into staging.
  void finish();

 private:
  // Inline storage for the most common call, with one tensor and one block.
  using Block = c10::SmallVector<ipc::BufferSegment, 1>;
  using Blocks = c10::SmallVector<Block, 1>;
  struct RequestBuffers {
    Blocks input, output;
  };
  struct StagedRange {  // executor memory that holds the data of a contiguous device tensor
    const std::byte *host, *tensor;
    std::size_t bytes;
  };
  static ipc::CallBuffer joined(const Blocks& blocks, std::size_t item_bytes);
  void check_same_memory_kind(const at::Tensor& tensor, bool on_device, const ArgumentName& label);
  ipc::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes);
  ipc::BufferSegment keep(at::Tensor tensor);
  const std::byte* origin(const std::byte* host) const;
  bool touches_written() const;
  void begin_copy_in();
  ipc::BufferSegment bind(const at::Tensor& tensor, const ArgumentName& label, bool reads,
                          bool writes);

  GroupCall& call_;
  const RankAndWorld me_;
  const RequestTemplate form_;
  c10::SmallVector<RequestBuffers, 1> parts_;  // [request]
  c10::SmallVector<ArgumentRange, 4> extents_;
  c10::SmallVector<StagedRange, 1> staged_ranges_;
};

}  // namespace pycollect::dist
