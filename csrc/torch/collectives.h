// The list collectives: arguments in, a job out. Nothing has moved when one of these throws.
#pragma once
#include <optional>
#include <string_view>

#include "prepared_call.h"

namespace pycollect {

// Tensors of several ranks: [index * world + rank], where a plain list has one index.
struct TensorGrid {
  Tensors flat;
  int world;
  const char* list = "tensors";  // what the caller calls it
  bool nested = false;
  std::size_t width() const { return world == 0 ? 0 : flat.size() / world; }
  Label label(const char* call, std::size_t i, Rank r) const {
    return {call, list, r, nested ? static_cast<int>(i) : -1};
  }
};

// Indices of a grid by dtype, in order of appearance, and the bytes of each.
struct DtypeGroup {
  DType dtype;
  std::size_t bytes = 0;
  std::vector<std::size_t> indices = {};
};
std::vector<DtypeGroup> dtype_groups(const char* call, const TensorGrid& grid);

// Without asking for the right to write, which would be a copy of a lazy clone that is only read;
// who is written was asked for that when its extent was.
std::byte* bytes_of(const at::Tensor& tensor);

// all_reduce, reduce and broadcast, of one tensor a rank or of many.
struct InPlaceArgs {
  Collective collective;
  const char* call;
  ReduceOp op = ReduceOp::sum;
  int64_t root = 0;
  const char* root_name = "dst";
  std::string_view algorithm = {};
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
};
PreparedCall block_collective(const BlockArgs& ask, Tensors inputs);

// A copy of every tensor for every rank; results are [index * world + rank].
PreparedCall replicate(Tensors tensors, const std::vector<at::Device>& devices);

// One tensor into another of the same shape and dtype, whatever their layouts.
PreparedCall copy(const at::Tensor& dst, const at::Tensor& src);

}  // namespace pycollect
