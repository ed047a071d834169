// Executes one rank's part of a collective between processes. Data that the plan moves between
// ranks passes through the transport's staging buffers, piece by piece, in two buffers alternately.
// Tensors that all ranks can access are read and written in place. This layer does not use torch.
#pragma once
#include <string_view>
#include <vector>

#include "../group/group.h"
#include "../plan/error.h"
#include "../plan/offsets.h"
#include "../plan/registry.h"

namespace pycollect::ipc {

class Transport;

struct BufferSegment {
  std::byte* base;
  std::size_t count;  // elements
};

// Input or output buffer of this rank: the elements of the segments, one after the other, cut into
// blocks for the plan's chunks. A buffer that holds the blocks of all ranks (all_gather's
// output) has one per rank; any other (all_gather's input, both buffers of all_reduce) has one
// block.
struct CallBuffer {
  std::vector<BufferSegment> segments = {};
  Sizes blocks = {};
  // Fingerprint of where tensors end within the blocks; 0 if each block is one tensor or empty.
  uint64_t cuts = 0;
};

// The tensors of a sparse all_reduce, whose entries the ranks exchange with all_gather. Ranks agree
// on these tensors, and messages name them, in place of the bytes that move.
struct SparseForm {
  DType dtype;
  ReduceOp op;
  uint64_t elements;  // of the dense shapes
  uint64_t shapes;    // hash of all that must agree
};

// One collective on tensors of one dtype, as one rank passes it to the executor.
struct CollectiveRequest {
  Collective collective;
  DType dtype = DType::u8;
  // Index in kAllDTypeNames of the tensors' dtype, which may differ if data only moves; 0: `dtype`.
  uint8_t moved_dtype = 0;
  ReduceOp op = ReduceOp::sum;
  Rank root = 0;
  std::string_view algorithm = {};  // empty: the selector chooses
  FoldOptions options = {};
  // True if the input is also the output; `output` is then empty. Must be the same on all ranks.
  // It may be false although this rank's own block lies within the other buffer.
  bool in_place = false;
  // A buffer that the collective does not use on this rank is empty.
  CallBuffer input = {}, output = {};
  // True if only the two ends of a transfer know its block size (all_to_all with split sizes,
  // gather and scatter of unequal parts). Must be the same on all ranks.
  bool irregular = false;
  // Number of the caller's tensors; must be the same on all ranks. 0: no data moves, the ranks only
  // agree on the call.
  uint64_t tensors = 1;
  const SparseForm* sparse = nullptr;  // set in a request that is part of a sparse all_reduce

  uint8_t dtype_number() const {
    return moved_dtype != 0 ? moved_dtype : static_cast<uint8_t>(dtype);
  }
  Collective called() const { return sparse ? Collective::all_reduce : collective; }  // by the user
};

// Runs the request in the calling thread together with the other ranks: to its end, or until all of
// it is enqueued if the transport's signals are stream-ordered. One call at a time per group, in
// the same order on all ranks; `call` numbers all calls consecutively, refused calls included.
// Throws std::invalid_argument on all ranks alike, before data has moved except into buffers, when
// the ranks' requests do not match; PeerLost and Timeout as Group::await does.
void run(Transport& transport, const CollectiveRequest& request, uint64_t call, Deadline deadline);

// Throws std::invalid_argument if `run` would refuse the request before publishing it.
void check(const Transport& transport, const CollectiveRequest& request);

// Checks that several requests of one operation match on all ranks, so that either all of them run
// or none. Takes the same number of call numbers from `calls` on all ranks. Throws as `run` does,
// for the first request that differs.
void agree_on_all(Transport& transport, const std::vector<const CollectiveRequest*>& requests,
                  uint64_t& calls, Deadline deadline);

// Publishes a refusal instead of running a call. All peers throw `why`, which begins with the name
// of the refused operation. Waits only for peers that have not begun the previous call.
void refuse(Transport& transport, Collective collective, uint64_t call, Deadline deadline,
            std::string_view why);

}  // namespace pycollect::ipc
