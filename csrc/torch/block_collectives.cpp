// Collectives that cut tensors into blocks along a dimension and join others; blocks.h knows who
// sends which block to whom.
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <numeric>

#include "../plan/error.h"
#include "../plan/stage.h"
#include "blocks.h"
#include "collectives.h"
#include "layout.h"
#include "threads.h"

namespace pycollect {
namespace {

Label label(const BlockArgs& ask, const char* list, std::size_t r) {
  return {name(ask.collective), list,
          ask.collective == Collective::scatter && list[0] == 't' ? -1 : static_cast<int>(r)};
}
const char* inputs_name(const BlockArgs& ask) {
  return ask.collective == Collective::scatter ? "tensor" : "tensors";
}

// Where every rank is. The root of scatter and gather is the first rank on the device of the one
// tensor, or one more rank behind the others, which has nothing else to do with it.
struct Parties {
  std::vector<at::Device> devices;
  int outputs;
  Rank root = 0;
  int world() const { return static_cast<int>(devices.size()); }
};

Parties parties_of(const BlockArgs& ask, const Tensors& inputs) {
  Parties all{ask.devices, 0};
  if (ask.collective != Collective::scatter) {
    all.devices.clear();
    for (const at::Tensor& t : inputs) all.devices.push_back(t.device());
  }
  all.outputs = ask.collective == Collective::gather ? 1 : all.world();
  if (ask.collective != Collective::scatter && ask.collective != Collective::gather) return all;
  const at::Device at = ask.collective == Collective::gather && !ask.devices.empty()
                            ? ask.devices[0]
                            : inputs[0].device();
  const auto found = std::find(all.devices.begin(), all.devices.end(), at);
  all.root = static_cast<Rank>(found - all.devices.begin());
  if (found == all.devices.end()) all.devices.push_back(at);
  return all;
}

DType check_inputs(const BlockArgs& ask, const Tensors& inputs, int64_t dim) {
  const Label first = label(ask, inputs_name(ask), 0);
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    const Label l = label(ask, inputs_name(ask), r);
    check_tensor(inputs[r], AccessMode::read, l);
    check_alike(inputs[r], l, inputs[0], first,
                ask.collective == Collective::reduce_scatter ? Alike::shape : Alike::all_but_dim,
                dim);
  }
  const DType dtype = dtype_of(inputs[0], first);
  if (ask.collective == Collective::reduce_scatter) check_op(dtype, ask.op, first.call);
  return dtype;
}

// What a result is to be: shape, dtype and device, without memory.
struct Wanted {
  std::vector<int64_t> sizes;
  at::Device device;
};

// Of the caller's own outputs: the right number, shape, dtype and place, apart from everything
// else.
void check_outputs(const BlockArgs& ask, const Tensors& inputs, const std::vector<Wanted>& wanted) {
  const char* call = name(ask.collective);
  require(ask.out->size() == wanted.size(), call, ": out has ", ask.out->size(),
          " tensors; needed are ", wanted.size());
  std::vector<Extent> extents;
  for (std::size_t r = 0; r < inputs.size(); ++r)
    extents.push_back(extent(inputs[r], AccessMode::read, label(ask, inputs_name(ask), r)));
  for (std::size_t r = 0; r < wanted.size(); ++r) {
    const at::Tensor& t = (*ask.out)[r];
    const Label l{call, "out", ask.collective == Collective::gather ? -1 : static_cast<int>(r)};
    check_tensor(t, AccessMode::write, l);
    require(t.scalar_type() == inputs[0].scalar_type(), call, ": ", l, " is ", dtype_name(t),
            "; needed is ", dtype_name(inputs[0]));
    require(t.sizes() == at::IntArrayRef(wanted[r].sizes), call, ": ", l, " has shape ", t.sizes(),
            "; needed is ", at::IntArrayRef(wanted[r].sizes));
    require(t.device() == wanted[r].device, call, ": ", l, " is on ", t.device(), "; needed is ",
            wanted[r].device);
    extents.push_back(extent(t, AccessMode::write, l));
  }
  check_disjoint(extents);
}

// An order of dimensions that serves inputs and outputs without a copy; where there is none the
// outputs decide, and inputs that lie otherwise are laid anew.
std::vector<int64_t> agree(const BlockArgs& ask, Tensors& inputs, Rank first) {
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
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    at::Tensor& t = inputs[i];
    const std::size_t rank = first + i;
    c10::OptionalStreamGuard as_the_caller;  // who produced it on a stream is read on that stream
    if (rank < ask.streams.size() && ask.streams[rank])
      as_the_caller.reset_stream(*ask.streams[rank]);
    at::Tensor laid = empty_in_order(t.sizes(), order, t.options());
    check_tensor(laid, AccessMode::write, {name(ask.collective), "a copy of an input"});
    copy_strided(laid, t);
    t = std::move(laid);
  }
  return order;
}

Sizes times(const Sizes& s, int64_t inner) {
  Sizes result(s);
  for (std::size_t& x : result) x *= static_cast<std::size_t>(inner);
  return result;
}

void bind_blocks(DtypePlan& part, const Blocks& b, const Parties& all, const Tensors& inputs,
                 PreparedCall& job, const Frame& frame, bool to_root, bool from_root) {
  const std::size_t item = item_bytes(part.dtype);
  auto at = std::make_unique<Offsets>(part.compiled->plan, times(b.whole, frame.inner),
                                      std::max<std::size_t>(kAlignBytes / item, 1));
  std::vector<Memory> memory(b.in.size() * kBuffers);
  auto put = [&](Rank r, Buffer buffer, const at::Tensor& t, const Sizes& blocks) {
    const int64_t pitch = sum(blocks, job.call) * frame.inner * static_cast<int64_t>(item);
    memory[r * kBuffers + static_cast<int>(buffer)] = {bytes_of(t), pitch};
  };
  for (Rank r = 0; r < all.world(); ++r) {
    at->set(r, Buffer::input, times(b.in[r], frame.inner));
    at->set(r, Buffer::output, times(b.out[r], frame.inner));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Rank r = from_root ? all.root : static_cast<Rank>(i);
    put(r, Buffer::input, inputs[i], b.in[r]);
  }
  for (std::size_t i = 0; i < job.results.size(); ++i) {
    const Rank r = to_root ? all.root : static_cast<Rank>(i);
    put(r, Buffer::output, job.results[i], b.out[r]);
  }
  cut_host_memory(part.compiled->plan, *at);
  part.bind(at.get(), std::move(memory), frame.rows, job);
  part.offsets.push_back(std::move(at));
}

BlockCut cut_of(const BlockArgs& ask, const Tensors& inputs, const Parties& all, int64_t dim) {
  BlockCut cut{ask.collective, {}, all.world(), all.outputs, all.root, ask.dim, ask.sizes};
  for (const at::Tensor& t : inputs) cut.lengths.push_back(t.size(dim));
  return cut;
}

std::vector<Wanted> results_of(const BlockArgs& ask, const Tensors& inputs, const Parties& all,
                               const Blocks& b, int64_t dim) {
  std::vector<Wanted> wanted;
  for (int i = 0; i < all.outputs; ++i) {
    const Rank r = ask.collective == Collective::gather ? all.root : i;
    wanted.push_back({inputs[0].sizes().vec(), all.devices[r]});
    wanted.back().sizes[dim] = sum(b.out[r], name(ask.collective));
  }
  return wanted;
}

}  // namespace

PreparedCall block_collective(const BlockArgs& ask, Tensors inputs) {
  const char* call = name(ask.collective);
  const bool to_root = ask.collective == Collective::gather,
             from_root = ask.collective == Collective::scatter;
  require(!inputs.empty(), call, ": tensors is empty; pass one tensor per rank");
  require(!from_root || !ask.devices.empty(), call, ": devices is empty; name one device per rank");
  const Label first = label(ask, inputs_name(ask), 0);
  check_tensor(inputs[0], AccessMode::read, first);
  const int64_t dim = check_dim(inputs[0], ask.dim, first);
  const DType dtype = check_inputs(ask, inputs, dim);
  const Parties all = parties_of(ask, inputs);
  const Blocks blocks = blocks_of(cut_of(ask, inputs, all, dim));
  const std::vector<Wanted> wanted = results_of(ask, inputs, all, blocks, dim);
  if (ask.out) check_outputs(ask, inputs, wanted);
  std::size_t bytes = 0;
  for (const at::Tensor& t : inputs) bytes = std::max<std::size_t>(bytes, t.nbytes());
  PreparedCall job{
      .call = call, .devices = all.devices, .streams = ask.streams, .peer_access = ask.peer_access};
  DtypePlan part = make_dtype_plan({ask.collective, all.world(), bytes, dtype, false},
                                   ask.algorithm, all.root, ask.op, job);
  if (!job.streams.empty()) job.streams.resize(all.devices.size());
  const std::vector<int64_t> order = agree(ask, inputs, from_root ? all.root : 0);
  if (ask.out) job.results = *ask.out;
  for (const Wanted& w : wanted) {
    if (ask.out) break;
    job.results.push_back(empty_in_order(w.sizes, order, inputs[0].options().device(w.device)));
    check_tensor(job.results.back(), AccessMode::write, {call, "a result"});
  }
  const Frame frame(inputs[0], order, dim);
  if (frame.rows > 0 && frame.inner > 0 && bytes > 0) {
    bind_blocks(part, blocks, all, inputs, job, frame, to_root, from_root);
    job.parts.push_back(std::move(part));
    job.bytes = bytes;
  }
  if (ask.out) job.written = job.results;
  job.held.insert(job.held.end(), inputs.begin(), inputs.end());
  return job;
}

}  // namespace pycollect
