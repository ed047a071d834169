// Collectives on lists of tensors: each function checks its arguments, chooses a plan and returns a
// PreparedCall. If a function throws, none of the caller's tensors has changed.
#pragma once
#include <optional>
#include <string_view>

#include "prepared_call.h"
#include "tensor_grid.h"

namespace pycollect {

// all_reduce, reduce and broadcast, of one tensor per rank or of many.
struct InPlaceArgs {
  Collective collective;
  const char* call;  // name of the Python function, for error messages and profiles
  ReduceOp op = ReduceOp::sum;
  int64_t root = 0;
  const char* root_name = "dst";  // the argument's name, for error messages
  std::string_view algorithm = {};
  bool peer_access = true;  // whether GPUs may access each other's memory
  Streams streams = {};     // [rank]; none: the device's current stream
};
// How the call accesses a rank's tensors: broadcast only reads those of the root, and reduce writes
// only those of the root.
AccessMode access_of(const InPlaceArgs& args, int64_t rank);
PreparedCall in_place(const InPlaceArgs& args, TensorGrid tensors);

// all_gather, reduce_scatter, all_to_all, scatter and gather, which move blocks along a dimension.
struct BlockArgs {
  Collective collective;
  ReduceOp op = ReduceOp::sum;
  int64_t dim = 0;
  std::string_view algorithm = {};
  // Block sizes: [rank][block], or one list for all ranks. Default: as torch.tensor_split.
  std::optional<std::vector<std::vector<int64_t>>> sizes = {};
  std::optional<Tensors> out = {};
  // scatter: the ranks' devices. gather: the result's device; default: that of the first input.
  std::vector<at::Device> devices = {};
  Streams streams = {};  // [rank]; none: the device's current stream
  bool peer_access = true;
};
PreparedCall block_collective(const BlockArgs& args, Tensors inputs);

// Copies every tensor to every rank; results are [index * world + rank].
PreparedCall replicate(Tensors tensors, const std::vector<at::Device>& devices, bool peer_access);

// Copies a tensor into another one of the same shape and dtype. Their layouts may differ.
PreparedCall copy(const at::Tensor& dst, const at::Tensor& src, bool peer_access);

}  // namespace pycollect
