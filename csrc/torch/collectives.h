// The list collectives: arguments in, a job out. Nothing has moved when one of these throws.
#pragma once
#include <optional>
#include <string_view>

#include "prepared_call.h"
#include "tensor_grid.h"

namespace pycollect {

// all_reduce, reduce and broadcast, of one tensor a rank or of many.
struct InPlaceArgs {
  Collective collective;
  const char* call;
  ReduceOp op = ReduceOp::sum;
  int64_t root = 0;
  const char* root_name = "dst";
  std::string_view algorithm = {};
  bool peer_access = true;  // may a GPU read and write another's memory?
};
// What becomes of a rank's tensor: broadcast only reads its source, reduce all but its destination.
AccessMode access_of(const InPlaceArgs& ask, int64_t rank);
PreparedCall in_place(const InPlaceArgs& ask, TensorGrid tensors);

// all_gather, reduce_scatter, all_to_all, scatter and gather: blocks along a dimension.
struct BlockArgs {
  Collective collective;
  ReduceOp op = ReduceOp::sum;
  int64_t dim = 0;
  std::string_view algorithm = {};
  std::optional<std::vector<std::vector<int64_t>>> sizes =
      {};  // [rank][block]; default: as torch.tensor_split
  std::optional<Tensors> out = {};
  std::vector<at::Device> devices =
      {};                // scatter: of the ranks; gather: of the result, if not the first's
  Streams streams = {};  // [rank], where the caller named them
  bool peer_access = true;
};
PreparedCall block_collective(const BlockArgs& ask, Tensors inputs);

// A copy of every tensor for every rank; results are [index * world + rank].
PreparedCall replicate(Tensors tensors, const std::vector<at::Device>& devices, bool peer_access);

// One tensor into another of the same shape and dtype, whatever their layouts.
PreparedCall copy(const at::Tensor& dst, const at::Tensor& src, bool peer_access);

}  // namespace pycollect
