// Collectives that cut tensors into blocks along a dimension and join others: who sends which block
// to whom is a table of sizes, and all five differ in that table alone.
#include <algorithm>
#include <numeric>

#include "../plan/error.h"
#include "collectives.h"
#include "layout.h"
#include "threads.h"

namespace pycollect {
namespace {

using enum Collective;

constexpr std::size_t kAlignBytes = 64;  // pieces begin at whole vectors
constexpr Rank kRoot = 0;                // of scatter and gather

Label label(const Exchange& ask, const char* list, std::size_t r) {
  return {name(ask.collective), list,
          ask.collective == scatter && list[0] == 't' ? -1 : static_cast<int>(r)};
}
const char* inputs_name(const Exchange& ask) {
  return ask.collective == scatter ? "tensor" : "tensors";
}

// Elements along the dimension, [rank][block], in the input and in the output of every rank.
struct Blocks {
  std::vector<Sizes> in, out;
  Sizes whole;  // the cut that every buffer is a part of: where scratch lies
};

Sizes even(int64_t length, int world) {  // as torch.tensor_split
  Sizes s(world);
  for (int r = 0; r < world; ++r) s[r] = length / world + (r < length % world);
  return s;
}

// The caller's sizes of one rank, or the even cut.
Sizes cut(const Exchange& ask, int64_t length, int rank, int world) {
  if (!ask.sizes) return even(length, world);
  const std::size_t lists = ask.sizes->size();
  require(lists == 1 || static_cast<int>(lists) == world, name(ask.collective),
          ": split_sizes has lists for ", lists, " ranks; needed are ", world);
  const auto& given = (*ask.sizes)[lists == 1 ? 0 : rank];
  const char* what = ask.collective == scatter ? "chunk_sizes" : "split_sizes";
  int64_t sum = 0;
  for (int64_t s : given) {
    require(s >= 0, name(ask.collective), ": ", what, " has a negative size, ", s);
    sum += s;
  }
  require(static_cast<int>(given.size()) == world && sum == length, name(ask.collective), ": ",
          what, " has ", given.size(), " sizes that sum to ", sum, "; needed are ", world,
          " that sum to ", length, ", the length along dim ", ask.dim);
  return {given.begin(), given.end()};
}

Sizes only(const Sizes& whole, Rank r) {
  Sizes s(whole.size());
  s[r] = whole[r];
  return s;
}

Blocks blocks_of(const Exchange& ask, const Tensors& inputs, int64_t dim) {
  const int world = ask.world;
  const Sizes none(world);
  Blocks b{std::vector<Sizes>(world, none), std::vector<Sizes>(world, none), none};
  if (ask.collective == all_to_all) {
    for (Rank r = 0; r < world; ++r) b.in[r] = cut(ask, inputs[r].size(dim), r, world);
    for (Rank r = 0; r < world; ++r)
      for (Rank p = 0; p < world; ++p) b.out[r][p] = b.in[p][r];
    return b;
  }
  const bool joins = ask.collective == all_gather || ask.collective == gather;
  if (joins)
    for (Rank r = 0; r < world; ++r) b.whole[r] = inputs[r].size(dim);
  else
    b.whole = cut(ask, inputs[0].size(dim), 0, world);
  for (Rank r = 0; r < world; ++r) {
    const bool root = r == kRoot;
    b.in[r] = joins ? only(b.whole, r) : ask.collective == reduce_scatter || root ? b.whole : none;
    b.out[r] = !joins ? only(b.whole, r) : ask.collective == all_gather || root ? b.whole : none;
  }
  return b;
}

int64_t length(const Sizes& s) {
  return static_cast<int64_t>(std::accumulate(s.begin(), s.end(), std::size_t{0}));
}

int outputs(const Exchange& ask) { return ask.collective == gather ? 1 : ask.world; }

DType check_inputs(const Exchange& ask, const Tensors& inputs, int64_t dim) {
  const Label first = label(ask, inputs_name(ask), 0);
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    const Label l = label(ask, inputs_name(ask), r);
    check_tensor(inputs[r], Use::read, l);
    check_alike(inputs[r], l, inputs[0], first,
                ask.collective == reduce_scatter ? Alike::shape : Alike::all_but_dim, dim);
  }
  const DType dtype = dtype_of(inputs[0], first);
  if (ask.collective == reduce_scatter) check_op(dtype, ask.op, first.call);
  return dtype;
}

// Of the caller's own outputs: the right number, shape, dtype and order, apart from everything
// else.
void check_outputs(const Exchange& ask, const Tensors& inputs,
                   const std::vector<std::vector<int64_t>>& shapes) {
  const char* call = name(ask.collective);
  require(static_cast<int>(ask.out->size()) == outputs(ask), call, ": out has ", ask.out->size(),
          " tensors; needed are ", outputs(ask));
  std::vector<Extent> extents;
  for (std::size_t r = 0; r < inputs.size(); ++r)
    extents.push_back(extent(inputs[r], Use::read, label(ask, inputs_name(ask), r)));
  for (std::size_t r = 0; r < ask.out->size(); ++r) {
    const at::Tensor& t = (*ask.out)[r];
    const Label l{call, "out", ask.collective == gather ? -1 : static_cast<int>(r)};
    check_tensor(t, Use::write, l);
    require(t.scalar_type() == inputs[0].scalar_type(), call, ": ", l, " is ", t.dtype().name(),
            "; needed is ", inputs[0].dtype().name());
    require(t.sizes() == at::IntArrayRef(shapes[r]), call, ": ", l, " has shape ", t.sizes(),
            "; needed is ", at::IntArrayRef(shapes[r]));
    extents.push_back(extent(t, Use::write, l));
  }
  check_disjoint(extents);
}

// An order of dimensions that serves inputs and outputs without a copy; where there is none the
// outputs decide, and inputs that lie otherwise are laid anew.
std::vector<int64_t> agree(const Exchange& ask, Tensors& inputs) {
  Tensors all = inputs;
  if (ask.out) all.insert(all.end(), ask.out->begin(), ask.out->end());
  std::vector<int64_t> order = common_order(all);
  if (!order.empty() || inputs[0].dim() == 0) return order;
  if (ask.out) {
    order = common_order(*ask.out);
    require(
        !order.empty(), name(ask.collective),
        ": the tensors of out must be contiguous, or all dense in the same order of dimensions");
  } else {
    order.resize(inputs[0].dim());
    std::iota(order.begin(), order.end(), 0);
  }
  for (at::Tensor& t : inputs) {
    at::Tensor laid = empty_in_order(t.sizes(), order, t.options());
    check_tensor(laid, Use::write, {name(ask.collective), "a copy of an input"});
    lay(laid, t);
    t = std::move(laid);
  }
  return order;
}

Sizes times(const Sizes& s, int64_t inner) {
  Sizes result(s);
  for (std::size_t& x : result) x *= static_cast<std::size_t>(inner);
  return result;
}

void bind_blocks(Part& part, const Blocks& b, const Tensors& inputs, Job& job, const Frame& frame) {
  const std::size_t item = item_bytes(part.dtype);
  auto at = std::make_unique<Offsets>(part.compiled->plan, times(b.whole, frame.inner),
                                      std::max<std::size_t>(kAlignBytes / item, 1));
  std::vector<Memory> memory(b.in.size() * kBuffers);
  auto memory_of = [&](const Tensors& tensors, std::size_t r, const Sizes& blocks) -> Memory {
    if (r >= tensors.size()) return {};
    const int64_t pitch = length(blocks) * frame.inner * static_cast<int64_t>(item);
    return {static_cast<std::byte*>(const_cast<void*>(tensors[r].const_data_ptr())), pitch};
  };
  for (std::size_t r = 0; r < b.in.size(); ++r) {
    at->set(static_cast<Rank>(r), Buffer::input, times(b.in[r], frame.inner));
    at->set(static_cast<Rank>(r), Buffer::output, times(b.out[r], frame.inner));
    memory[r * kBuffers] = memory_of(inputs, r, b.in[r]);
    memory[r * kBuffers + 1] = memory_of(job.results, r, b.out[r]);
  }
  part.bind(at.get(), std::move(memory), frame.rows, job.held);
  part.offsets.push_back(std::move(at));
}

}  // namespace

Job exchange_blocks(const Exchange& given, Tensors inputs) {
  Exchange ask = given;
  const char* call = name(ask.collective);
  if (ask.collective != scatter) ask.world = static_cast<int>(inputs.size());
  require(ask.world > 0, call,
          ask.collective == scatter ? ": devices is empty; name one device per rank"
                                    : ": tensors is empty; pass one tensor per rank");
  const Label first = label(ask, inputs_name(ask), 0);
  check_tensor(inputs[0], Use::read, first);
  const int64_t dim = check_dim(inputs[0], ask.dim, first);
  const DType dtype = check_inputs(ask, inputs, dim);
  const Blocks blocks = blocks_of(ask, inputs, dim);
  std::vector<std::vector<int64_t>> shapes;
  for (int r = 0; r < outputs(ask); ++r) {
    shapes.push_back(inputs[0].sizes().vec());
    shapes.back()[dim] = length(blocks.out[r]);
  }
  if (ask.out) check_outputs(ask, inputs, shapes);
  std::size_t bytes = 0;
  for (const at::Tensor& t : inputs) bytes = std::max<std::size_t>(bytes, t.nbytes());
  Part part =
      make_part({ask.collective, ask.world, bytes, dtype, false}, ask.algorithm, kRoot, ask.op);

  Job job;
  const std::vector<int64_t> order = agree(ask, inputs);
  if (ask.out)
    job.results = *ask.out;
  else
    for (const auto& shape : shapes)
      job.results.push_back(empty_in_order(shape, order, inputs[0].options()));
  for (const at::Tensor& t : job.results) check_tensor(t, Use::write, {call, "a result"});
  const Frame frame(inputs[0], order, dim);
  if (frame.rows > 0 && frame.inner > 0 && bytes > 0) {
    bind_blocks(part, blocks, inputs, job, frame);
    job.parts.push_back(std::move(part));
    job.bytes = bytes;
  }
  if (ask.out)
    for (const at::Tensor& t : job.results)
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  job.held.insert(job.held.end(), inputs.begin(), inputs.end());
  return job;
}

}  // namespace pycollect
