// Collectives that move blocks without a reduction: all_gather, gather, scatter and all_to_all.
#include "../../plan/error.h"
#include "builders.h"
#include "shapes.h"

namespace pycollect::dist {
namespace {

constexpr const char *kInput = "input", *kOutput = "output";

std::size_t world_size(RankAndWorld me) { return static_cast<std::size_t>(me.world); }

// Returns the form of a call in which only the sender and the receiver of a block know its size.
RequestTemplate irregular_form(std::size_t input_blocks, std::size_t output_blocks,
                               int64_t root = 0) {
  return {.input_blocks = input_blocks,
          .output_blocks = output_blocks,
          .root = static_cast<Rank>(root),
          .irregular = true};
}

}  // namespace

// The input of all_gather may be this rank's own part of the output.
void all_gather(GroupCall& call, RankAndWorld me, const TensorLists& outputs,
                const Tensors& inputs) {
  check_lists(call, me, inputs, outputs);
  Binder binder(call, me, {.input_blocks = 1, .output_blocks = world_size(me)});
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const ArgumentName input = label_of(call, kInput, inputs, i);
    const std::size_t request = binder.request(inputs[i], input);
    ipc::BufferSegment own{};
    for (Rank r = 0; r < me.world; ++r) {
      const ArgumentName label{call.name, "output_list", r};
      const at::Tensor& output = outputs[i][r];
      check_dtype(output, label, inputs[i], input);
      if (r == me.rank) check_size(output, label, inputs[i], input);
      const ipc::BufferSegment span = binder.write(output, label);
      binder.add_output(request, r, span);
      if (r == me.rank) own = span;
      call.results.push_back(output);
    }
    binder.add_input(request, 0, binder.read_whole_aliasing(inputs[i], input, own));
  }
  binder.finish();
}

void all_gather_single(GroupCall& call, RankAndWorld me, const Tensors& outputs,
                       const Tensors& inputs) {
  check_pairs(call, outputs, inputs);
  Binder binder(call, me, {.input_blocks = 1, .output_blocks = world_size(me)});
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const ArgumentName input = label_of(call, kInput, inputs, i);
    const ArgumentName output = label_of(call, kOutput, outputs, i);
    check_joined(outputs[i], output, inputs[i], input, me.world);
    const std::size_t request = binder.request(inputs[i], input);
    const ipc::BufferSegment whole = binder.write(outputs[i], output);
    binder.add_whole_output(request, whole);
    binder.add_input(
        request, 0,
        binder.read_whole_aliasing(inputs[i], input, binder.part(request, whole, me.rank)));
  }
  binder.finish();
  call.results = outputs;
}

void gather(GroupCall& call, RankAndWorld me, const TensorLists& outputs, const Tensors& inputs,
            int64_t root) {
  check_rank(root, me.world, call.name, "dst");
  check_one(call, "inputs", inputs.size());
  const bool receives = me.rank == root;
  const ArgumentName input{call.name, "tensor"};
  Binder binder(call, me, irregular_form(1, receives ? world_size(me) : 0, root));
  const std::size_t request = binder.request(inputs[0], input);
  ipc::BufferSegment own{};
  if (receives) {
    check_lists(call, me, inputs, outputs);
    for (Rank r = 0; r < me.world; ++r) {
      const ArgumentName label{call.name, "gather_list", r};
      check_dtype(outputs[0][r], label, inputs[0], input);
      if (r == me.rank) check_size(outputs[0][r], label, inputs[0], input);
      const ipc::BufferSegment span = binder.write(outputs[0][r], label);
      binder.add_output(request, r, span);
      if (r == me.rank) own = span;
    }
    call.results = outputs[0];
  } else {
    require(outputs.empty(), call.name, ": this rank is not dst; pass no gather_list");
  }
  binder.add_input(request, 0, binder.read_whole_aliasing(inputs[0], input, own));
  binder.finish();
}

void gather_single(GroupCall& call, RankAndWorld me, const at::Tensor& output,
                   const at::Tensor& input, int64_t root) {
  check_rank(root, me.world, call.name, "dst");
  const bool receives = me.rank == root;
  const ArgumentName in{call.name, kInput}, out{call.name, kOutput};
  Binder binder(call, me, irregular_form(1, receives ? world_size(me) : 0, root));
  const std::size_t request = binder.request(input, in);
  ipc::BufferSegment own{};
  if (receives) {
    check_joined(output, out, input, in, me.world);
    const ipc::BufferSegment whole = binder.write(output, out);
    binder.add_whole_output(request, whole);
    own = binder.part(request, whole, me.rank);
    call.results = {output};
  }
  binder.add_input(request, 0, binder.read_whole_aliasing(input, in, own));
  binder.finish();
}

void scatter(GroupCall& call, RankAndWorld me, const Tensors& outputs, const TensorLists& inputs,
             int64_t root) {
  check_rank(root, me.world, call.name, "src");
  check_one(call, "outputs", outputs.size());
  const bool sends = me.rank == root;
  const ArgumentName output{call.name, "tensor"};
  Binder binder(call, me, irregular_form(sends ? world_size(me) : 0, 1, root));
  const std::size_t request = binder.request(outputs[0], output);
  const ipc::BufferSegment own = binder.write(outputs[0], output);
  binder.add_output(request, 0, own);
  if (sends) {
    check_lists(call, me, outputs, inputs);
    for (Rank r = 0; r < me.world; ++r) {
      const ArgumentName label{call.name, "scatter_list", r};
      check_dtype(inputs[0][r], label, outputs[0], output);
      if (r == me.rank) check_size(inputs[0][r], label, outputs[0], output);
      binder.add_input(request, r, binder.read_aliasing(inputs[0][r], label, own));
    }
  } else {
    require(inputs.empty(), call.name, ": this rank is not src; pass no scatter_list");
  }
  binder.finish();
  call.results = outputs;
}

void all_to_all(GroupCall& call, RankAndWorld me, const Tensors& outputs, const Tensors& inputs) {
  check_list(call, me, outputs);
  check_list(call, me, inputs);
  Binder binder(call, me, irregular_form(world_size(me), world_size(me)));
  const ArgumentName first{call.name, "output_list", 0};
  const std::size_t request = binder.request(outputs[0], first);
  for (Rank r = 0; r < me.world; ++r) {
    const ArgumentName output{call.name, "output_list", r}, input{call.name, "input_list", r};
    check_dtype(outputs[r], output, outputs[0], first);
    check_dtype(inputs[r], input, outputs[0], first);
    if (r == me.rank) check_size(inputs[r], input, outputs[r], output);
    binder.add_output(request, r, binder.write(outputs[r], output));
    binder.add_input(request, r, binder.read(inputs[r], input));
  }
  binder.finish();
  call.results = outputs;
}

namespace {

// Returns the number of elements that go to, or come from, each rank.
Sizes split_counts(const at::Tensor& t, const ArgumentName& label,
                   const std::vector<int64_t>& splits, const char* what, int world) {
  require(t.dim() > 0, label.call, ": ", label, " has no dimension to split; pass .reshape(1)");
  const int64_t rows = t.size(0), row = rows == 0 ? 0 : t.numel() / rows;
  if (splits.empty()) {
    require(rows % world == 0, label.call, ": ", label, " has a first dimension of ", rows,
            ", which is not divisible by ", world, " ranks; pass ", what);
    return Sizes(world, rows / world * row);
  }
  int64_t total = 0;
  Sizes sizes;
  for (int64_t s : splits) {
    require(s >= 0, label.call, ": ", what, " has a negative size, ", s);
    total += s;
    sizes.push_back(s * row);
  }
  require(static_cast<int>(splits.size()) == world && total == rows, label.call, ": ", what,
          " has ", splits.size(), " sizes that sum to ", total, "; pass ", world, " that sum to ",
          rows, ", the first dimension of ", label);
  return sizes;
}

}  // namespace

void all_to_all_single(GroupCall& call, RankAndWorld me, const at::Tensor& output,
                       const at::Tensor& input, const Splits& splits) {
  const ArgumentName in{call.name, kInput}, out{call.name, kOutput};
  check_dtype(input, in, output, out);
  const Sizes sent = split_counts(input, in, splits.input, "input_split_sizes", me.world);
  const Sizes received = split_counts(output, out, splits.output, "output_split_sizes", me.world);
  require(sent[me.rank] == received[me.rank], call.name, ": this rank sends ", sent[me.rank],
          " elements of ", in, " to itself and has room for ", received[me.rank], " in ", out,
          "; both must be equal");
  Binder binder(call, me, irregular_form(world_size(me), world_size(me)));
  const std::size_t request = binder.request(output, out);
  const std::size_t item = item_bytes(call.requests[request].dtype);
  ipc::BufferSegment to = binder.write(output, out), from = binder.read(input, in);
  for (Rank r = 0; r < me.world; ++r) {
    binder.add_output(request, r, {to.base, received[r]});
    binder.add_input(request, r, {from.base, sent[r]});
    to.base += received[r] * item;
    from.base += sent[r] * item;
  }
  binder.finish();
  call.results = {output};
}

}  // namespace pycollect::dist
