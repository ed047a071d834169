// Collectives that split and concatenate tensors along a dimension. They differ only in the blocks
// that each rank has in its input and in its output.
#include <algorithm>
#include <numeric>

#include "../plan/error.h"
#include "../plan/passes.h"
#include "collectives.h"
#include "gpus.h"
#include "tensor_layout.h"

namespace pycollect {
namespace {

// Elements along the dimension, [rank][block], in the input and in the output of every rank.
struct BlockSizes {
  std::vector<Sizes> in, out;
  // Sizes of all blocks, as in scratch memory; an input or output has some or all of them.
  Sizes whole;
};

struct BlockCut {
  Collective collective;
  // Sizes of the inputs along the dimension, in rank order: one for scatter, and the same one
  // `world` times for reduce_scatter.
  std::vector<int64_t> lengths;
  int world;    // number of ranks, including an additional rank that is only the root
  int outputs;  // number of outputs
  Rank root = 0;
  int64_t dim = 0;  // for error messages
  // Block sizes from the caller: [rank][block], or one list for all ranks.
  std::optional<std::vector<std::vector<int64_t>>> sizes = {};
};

Sizes even_split(int64_t length, int parts) {
  Sizes s(parts);
  for (int r = 0; r < parts; ++r) s[r] = length / parts + (r < length % parts);
  return s;
}

// Returns the caller's block sizes for one rank, or an even split.
Sizes block_sizes(const BlockCut& cut, int64_t length, int rank) {
  const int parts = cut.outputs;
  if (!cut.sizes) return even_split(length, parts);
  const auto lists = static_cast<int>(cut.sizes->size());
  require(lists == 1 || lists == parts, name(cut.collective), ": split_sizes has lists for ", lists,
          " ranks; needed are ", parts);
  const auto& given = (*cut.sizes)[lists == 1 ? 0 : rank];
  const char* argument = cut.collective == Collective::scatter ? "chunk_sizes" : "split_sizes";
  int64_t total = 0;
  for (int64_t s : given) {
    require(s >= 0, name(cut.collective), ": ", argument, " has a negative size, ", s);
    require(!__builtin_add_overflow(total, s, &total), name(cut.collective), ": ", argument,
            " has sizes whose sum does not fit 64 bits; needed are ", parts, " that sum to ",
            length, ", the length along dim ", cut.dim);
  }
  require(static_cast<int>(given.size()) == parts && total == length, name(cut.collective), ": ",
          argument, " has ", given.size(), " sizes that sum to ", total, "; needed are ", parts,
          " that sum to ", length, ", the length along dim ", cut.dim);
  return {given.begin(), given.end()};
}

Sizes only_block(const Sizes& whole, Rank r) {
  Sizes s(whole.size());
  s[r] = whole[r];
  return s;
}

BlockSizes all_to_all_blocks(const BlockCut& cut) {
  BlockSizes b{{}, std::vector<Sizes>(cut.world, Sizes(cut.world)), Sizes(cut.world)};
  for (Rank r = 0; r < cut.world; ++r) b.in.push_back(block_sizes(cut, cut.lengths[r], r));
  for (Rank r = 0; r < cut.world; ++r)
    for (Rank p = 0; p < cut.world; ++p) b.out[r][p] = b.in[p][r];
  return b;
}

// Returns the caller's blocks, or those of torch.tensor_split if `sizes` is empty. Throws
// ValueError if the caller's sizes do not fit the lengths.
BlockSizes blocks_of(const BlockCut& cut) {
  if (cut.collective == Collective::all_to_all) return all_to_all_blocks(cut);
  const bool joins =
      cut.collective == Collective::all_gather || cut.collective == Collective::gather;
  BlockSizes b{
      {},
      {},
      joins ? Sizes(cut.lengths.begin(), cut.lengths.end()) : block_sizes(cut, cut.lengths[0], 0)};
  b.whole.resize(cut.world);
  const Sizes none(cut.world);
  for (Rank r = 0; r < cut.world; ++r) {
    const bool reads_all = cut.collective == Collective::reduce_scatter || r == cut.root;
    const bool writes_all = cut.collective == Collective::all_gather || r == cut.root;
    b.in.push_back(joins ? only_block(b.whole, r) : reads_all ? b.whole : none);
    b.out.push_back(!joins ? only_block(b.whole, r) : writes_all ? b.whole : none);
  }
  return b;
}

// Returns the sum of the sizes. Throws ValueError if it does not fit 64 bits.
int64_t sum(const Sizes& sizes, const char* call) {
  int64_t total = 0;
  for (const std::size_t s : sizes)  // expanded tensors and empty ones can have huge lengths
    require(!__builtin_add_overflow(total, s, &total), call,
            ": the lengths along dim have a sum that does not fit 64 bits");
  return total;
}

ArgumentName label(const ListArgs& args, const char* list, std::size_t r) {
  return {name(args.collective), list,
          args.collective == Collective::scatter && list[0] == 't' ? -1 : static_cast<int>(r)};
}
const char* inputs_name(const ListArgs& args) {
  return args.collective == Collective::scatter ? "tensor" : "tensors";
}

// The ranks of a call and their devices. The root of scatter and gather is the first rank on the
// device of the single tensor. Without such a rank it is an additional last rank, which has no
// other part in the call.
struct Participants {
  std::vector<at::Device> devices;
  int outputs;
  Rank root = 0;
  int world() const { return static_cast<int>(devices.size()); }
};

Participants participants_of(const ListArgs& args, const Tensors& inputs) {
  Participants ranks{args.devices, 0};
  if (args.collective != Collective::scatter) {
    ranks.devices.clear();
    for (const at::Tensor& t : inputs) ranks.devices.push_back(t.device());
  }
  ranks.outputs = args.collective == Collective::gather ? 1 : ranks.world();
  if (args.collective != Collective::scatter && args.collective != Collective::gather) return ranks;
  const at::Device at = args.collective == Collective::gather && !args.devices.empty()
                            ? args.devices[0]
                            : inputs[0].device();
  const auto found = std::find(ranks.devices.begin(), ranks.devices.end(), at);
  ranks.root = static_cast<Rank>(found - ranks.devices.begin());
  if (found == ranks.devices.end()) ranks.devices.push_back(at);
  return ranks;
}

DType check_inputs(const ListArgs& args, const Tensors& inputs, int64_t dim) {
  const ArgumentName first = label(args, inputs_name(args), 0);
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    const ArgumentName l = label(args, inputs_name(args), r);
    check_tensor(inputs[r], AccessMode::read, l);
    check_matches(inputs[r], l, inputs[0], first,
                  args.collective == Collective::reduce_scatter ? Match::shape : Match::all_but_dim,
                  dim);
  }
  if (args.collective != Collective::reduce_scatter) return moved_dtype_of(inputs[0], first);
  const DType dtype = dtype_of(inputs[0], first);
  check_op(dtype, args.op, first.call);
  return dtype;
}

// Shape, device and rank of a result. Its dtype is that of the inputs.
struct ResultSpec {
  std::vector<int64_t> sizes;
  at::Device device;
  Rank rank;
};

// Checks number, shape, dtype and device of the caller's outputs, and that they overlap neither
// each other nor the inputs.
void check_outputs(const ListArgs& args, const Tensors& inputs,
                   const std::vector<ResultSpec>& specs) {
  const char* call = name(args.collective);
  require(args.out->size() == specs.size(), call, ": out has ", args.out->size(),
          " tensors; needed are ", specs.size());
  std::vector<ArgumentExtent> extents;
  for (std::size_t r = 0; r < inputs.size(); ++r)
    extents.push_back(extent(inputs[r], AccessMode::read, label(args, inputs_name(args), r)));
  for (std::size_t r = 0; r < specs.size(); ++r) {
    const at::Tensor& t = (*args.out)[r];
    const ArgumentName l{call, "out",
                         args.collective == Collective::gather ? -1 : static_cast<int>(r)};
    check_tensor(t, AccessMode::write, l);
    require(t.scalar_type() == inputs[0].scalar_type(), call, ": ", l, " is ", dtype_name(t),
            "; needed is ", dtype_name(inputs[0]));
    require(t.sizes() == at::IntArrayRef(specs[r].sizes), call, ": ", l, " has shape ", t.sizes(),
            "; needed is ", at::IntArrayRef(specs[r].sizes));
    require(t.device() == specs[r].device, call, ": ", l, " is on ", t.device(), "; needed is ",
            specs[r].device);
    extents.push_back(extent(t, AccessMode::write, l));
  }
  check_disjoint(extents);
}

// Returns an order of dimensions in which all inputs and outputs are contiguous. If there is none,
// returns that of the caller's outputs, or else the row-major one, and replaces the inputs by
// tensors in that order, into which the call copies them. `first`: the rank of the first input.
std::vector<int64_t> to_common_order(const ListArgs& args, Tensors& inputs, Rank first,
                                     ListCall& call) {
  Tensors all = inputs;
  if (args.out) all.insert(all.end(), args.out->begin(), args.out->end());
  std::vector<int64_t> order = common_order(all);
  if (!order.empty() || inputs[0].dim() == 0) return order;
  if (args.out) {
    order = common_order(*args.out);
    require(
        !order.empty(), name(args.collective),
        ": the tensors of out must be contiguous, or all dense in the same order of dimensions");
  } else {
    order.resize(inputs[0].dim());
    std::iota(order.begin(), order.end(), 0);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor& t = inputs[i];
    const Rank rank = first + static_cast<Rank>(i);
    at::Tensor ordered;
    on_stream_of(args.streams, rank,
                 [&] { ordered = empty_in_order(t.sizes(), order, t.options()); });
    call.replace(t, std::move(ordered), rank);
  }
  return order;
}

Sizes times(const Sizes& s, int64_t inner) {
  Sizes result(s);
  for (std::size_t& x : result) x *= static_cast<std::size_t>(inner);
  return result;
}

void bind_blocks(BoundPlan& plan, const BlockSizes& b, const Participants& ranks,
                 const Tensors& inputs, ListCall& call, const OuterInner& split, bool to_root,
                 bool from_root) {
  const std::size_t item = item_bytes(plan.dtype);
  PlanOffsets offsets(plan.compiled.plan, times(b.whole, split.inner), aligned_elements(item));
  std::vector<BufferMemory> memory(b.in.size() * kBuffers);
  auto set_memory = [&](Rank r, Buffer buffer, const at::Tensor& t, const Sizes& blocks) {
    const int64_t pitch = sum(blocks, call.name) * split.inner * static_cast<int64_t>(item);
    memory[r * kBuffers + static_cast<int>(buffer)] = {bytes_of(t), pitch};
  };
  for (Rank r = 0; r < ranks.world(); ++r) {
    offsets.set(r, Buffer::input, times(b.in[r], split.inner));
    offsets.set(r, Buffer::output, times(b.out[r], split.inner));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Rank r = from_root ? ranks.root : static_cast<Rank>(i);
    set_memory(r, Buffer::input, inputs[i], b.in[r]);
  }
  for (std::size_t i = 0; i < call.results.size(); ++i) {
    const Rank r = to_root ? ranks.root : static_cast<Rank>(i);
    set_memory(r, Buffer::output, call.results[i], b.out[r]);
  }
  cut_host_memory(plan.compiled.plan, offsets);
  call.bind(plan, std::move(offsets), std::move(memory), static_cast<std::size_t>(split.rows));
}

BlockCut cut_of(const ListArgs& args, const Tensors& inputs, const Participants& ranks,
                int64_t dim) {
  BlockCut cut{args.collective, {}, ranks.world(), ranks.outputs, ranks.root, args.dim, args.sizes};
  for (const at::Tensor& t : inputs) cut.lengths.push_back(t.size(dim));
  return cut;
}

std::vector<ResultSpec> result_specs(const ListArgs& args, const Tensors& inputs,
                                     const Participants& ranks, const BlockSizes& b, int64_t dim) {
  std::vector<ResultSpec> specs;
  for (int i = 0; i < ranks.outputs; ++i) {
    const Rank r = args.collective == Collective::gather ? ranks.root : i;
    specs.push_back({inputs[0].sizes().vec(), ranks.devices[r], r});
    specs.back().sizes[dim] = sum(b.out[r], name(args.collective));
  }
  return specs;
}

}  // namespace

ListCall block_collective(ListArgs args) {
  Tensors& inputs = args.inputs.flat;
  const char* function = name(args.collective);
  const bool to_root = args.collective == Collective::gather,
             from_root = args.collective == Collective::scatter;
  require(!inputs.empty(), function, ": tensors is empty; pass one tensor per rank");
  require(!from_root || !args.devices.empty(), function,
          ": devices is empty; name one device per rank");
  const ArgumentName first = label(args, inputs_name(args), 0);
  check_tensor(inputs[0], AccessMode::read, first);
  const int64_t dim = check_dim(inputs[0], args.dim, first);
  const DType dtype = check_inputs(args, inputs, dim);
  const Participants ranks = participants_of(args, inputs);
  const BlockSizes blocks = blocks_of(cut_of(args, inputs, ranks, dim));
  const std::vector<ResultSpec> specs = result_specs(args, inputs, ranks, blocks, dim);
  if (args.out) check_outputs(args, inputs, specs);
  std::size_t bytes = 0;
  for (const at::Tensor& t : inputs) bytes = std::max<std::size_t>(bytes, t.nbytes());
  ListCall call{.name = function,
                .devices = ranks.devices,
                .held = inputs,
                .streams = args.streams,
                .peer_access = args.peer_access};
  const SelectionKey key{.collective = args.collective,
                         .world = ranks.world(),
                         .bytes = bytes,
                         .dtype = dtype,
                         .in_place = false,
                         .order = args.order};
  BoundPlan plan = call.make_plan(key, args.algorithm, ranks.root, args.op);
  if (!call.streams.empty()) call.streams.resize(ranks.devices.size());
  const std::vector<int64_t> order =
      to_common_order(args, inputs, from_root ? ranks.root : 0, call);
  if (args.out) call.results = *args.out;
  for (const ResultSpec& w : specs) {
    if (args.out) break;
    on_stream_of(call.streams, w.rank, [&] {
      call.results.push_back(empty_in_order(w.sizes, order, inputs[0].options().device(w.device)));
    });
    check_tensor(call.results.back(), AccessMode::write, {function, "a result"});
  }
  const OuterInner split(inputs[0], order, dim);
  if (split.rows > 0 && split.inner > 0 && bytes > 0) {
    bind_blocks(plan, blocks, ranks, inputs, call, split, to_root, from_root);
    call.plans.push_back(std::move(plan));
    call.bytes = bytes;
  }
  if (args.out) call.written = call.results;
  return call;
}

}  // namespace pycollect
