// Collectives on lists of tensors: each function checks its arguments, chooses a plan and returns a
// ListCall. If a function throws, none of the caller's tensors has changed.
#pragma once
#include <optional>
#include <string_view>

#include "list_call.h"

namespace pycollect {

// The same number of tensors of each rank: flat[index * world + rank]. A plain list, one tensor per
// rank, has only index 0.
struct TensorGrid {
  Tensors flat;
  int world;
  const char* list = "tensors";  // the argument's name, for error messages
  bool nested = false;
  std::size_t width() const { return world == 0 ? 0 : flat.size() / world; }
  ArgumentName label(const char* call, std::size_t i, int rank) const {
    return {call, list, rank, nested ? static_cast<int>(i) : -1};
  }
  DeviceList devices() const {  // [rank], of the first tensors; empty if there are none
    DeviceList all;
    all.reserve(world);
    for (int r = 0; r < world && !flat.empty(); ++r) all.push_back(flat[r].device());
    return all;
  }
};

// The arguments of a collective. Each has those that its declaration names (declarations.h), and
// the others keep these values.
struct ListArgs {
  Collective collective;
  const char* call;        // name of the Python function, for error messages and profiles
  TensorGrid inputs = {};  // scatter: one tensor, copy_: dst and src, both with a world of 0
  ReduceOp op = ReduceOp::sum;
  int64_t root = 0;
  int64_t dim = 0;
  std::string_view algorithm = {};
  FoldOrder order = FoldOrder::rank;
  // Block sizes: [rank][block], or one list for all ranks. Default: as torch.tensor_split.
  std::optional<std::vector<std::vector<int64_t>>> sizes = {};
  // scatter and replicate: the ranks' devices. gather: the result's device; default: that of the
  // first input.
  DeviceList devices = {};
  std::optional<Tensors> out = {};
  Streams streams = {};                      // [rank]; none: the device's current stream
  bool peer_access = true;                   // whether GPUs may access each other's memory
  std::optional<at::ScalarType> dtype = {};  // tree_sum: of the result; default: that of the inputs
};

// Returns the name of the argument `root`.
constexpr const char* root_name(Collective c) { return c == Collective::broadcast ? "src" : "dst"; }
// How a call in place accesses a rank's tensors: broadcast only reads those of the root, and reduce
// writes only those of the root.
AccessMode access_of(const ListArgs& args, int64_t rank);

// all_reduce, reduce and broadcast, of one tensor per rank or of many.
ListCall in_place(ListArgs args);
// all_gather, reduce_scatter, all_to_all, scatter and gather, which move blocks along a dimension.
ListCall block_collective(ListArgs args);
// Returns one tensor, the sum in tree order of tensors of one device.
ListCall tree_sum(ListArgs args);
// Copies every tensor to every rank; results are [index * world + rank].
ListCall replicate(ListArgs args);
// Copies a tensor into another one of the same shape and dtype. Their layouts may differ.
ListCall copy(ListArgs args);

}  // namespace pycollect
