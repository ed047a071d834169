// all_reduce of sparse tensors (COO). The ranks exchange how many entries each has, then all
// entries; an entry is an index and the values there. Then each rank adds up the entries of all
// ranks, in rank order, and has the same bits. A rank without an entry at an index adds nothing
// there, not 0.0.
#pragma once
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

#include "../../cpu/sparse_fold.h"
#include "binder.h"
#include "builders.h"

namespace pycollect::dist {

class SparseSums {
 public:
  // Takes the sparse ones of the tensors. Throws if one is not valid, before data moves.
  SparseSums(const GroupCall& call, RankAndWorld me, at::TensorList tensors,
             const Reduction& reduction);
  SparseSums(const SparseSums&) = delete;
  SparseSums& operator=(const SparseSums&) = delete;

  // Returns the request that exchanges the numbers of entries, in memory of this object.
  ipc::CollectiveRequest counting();
  // Takes the tensors' entries. Call before that request runs.
  void coalesce();
  // Returns the request that exchanges the entries. Call after the first request has run.
  ipc::CollectiveRequest exchange();
  // Adds up the entries of all ranks, and replaces those of the tensors of `here` by the result:
  // of this rank or, after coalesce() instead of both requests, of all ranks.
  static void finish(const std::vector<SparseSums*>& here);

 private:
  struct EntryTensors {  // contiguous, on the host
    at::Tensor indices;  // [entry][sparse dimension]
    at::Tensor values;   // [entry], and the dense dimensions
  };
  struct SparseOperand {
    at::Tensor tensor;
    std::optional<c10::Stream> stream = {};  // the caller's, if the tensor is on a device
    DType dtype;
    int64_t dims, elements;           // sparse dimensions; values of an entry
    EntryTensors own = {}, all = {};  // of this rank; of all ranks, in rank order

    std::size_t index_bytes() const { return dims * sizeof(int64_t); }
    std::size_t value_bytes() const { return elements * item_bytes(dtype); }
    cpu::EntryList list(const EntryTensors& entries, int64_t first, int64_t count) const;
    EntryTensors empty(int64_t count) const;
  };
  void add(const at::Tensor& tensor, const ArgumentName& label, DType dtype, DeviceOps& devices);
  void describe_form(ReduceOp op);
  int64_t count(Rank r, std::size_t i) const { return counts_[r * operands_.size() + i]; }
  EntryTensors fold(const SparseOperand& operand, std::vector<cpu::EntryList> ranks) const;

  const RankAndWorld me_;
  const ReduceOp op_;
  const FoldOptions options_;
  std::vector<SparseOperand> operands_;
  ipc::SparseForm form_{};
  std::vector<int64_t> own_counts_, counts_;  // [operand]; [rank][operand]
  // Memory of the requests.
  ipc::CallBufferMemory own_counts_memory_, counts_memory_, own_memory_, all_memory_;
};

}  // namespace pycollect::dist
