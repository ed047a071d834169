// See builders.h. Buffers of all_reduce, reduce and broadcast are not split by rank; all_gather,
// gather, scatter, reduce_scatter and all_to_all have a block for every rank.
#include "builders.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mul.h>

#include <algorithm>

#include "../../plan/error.h"
#include "sparse.h"

namespace pycollect::dist {
namespace {

// Returns the factor. If it is on a device, waits for that, so the call's tensors must have been
// checked before.
at::Scalar factor_of(const c10d::_SupplementBase& supplement) {
  // torch.distributed._make_nccl_premul_sum makes this type, the only supplement of PREMUL_SUM.
  const auto& given = static_cast<const c10d::NCCLPreMulSumSupplement&>(supplement);
  return given.tensor_factor.defined() ? given.tensor_factor.item()
                                       : at::Scalar(given.double_factor);
}

Binder::Fill product(const at::Tensor& t, const at::Scalar& factor) {
  return [t, factor](const at::Tensor& into) {
    const at::AutoDispatchBelowADInplaceOrView as_memory;                // allows inference tensors
    if (at::isFloatingType(t.scalar_type()) && t.element_size() == 1) {  // no mul in torch
      into.copy_(at::mul(t.to(at::kFloat), factor));
      return;
    }
    at::Tensor out = into;
    at::mul_out(out, t, at::native::wrapped_scalar_tensor(factor));
  };
}

}  // namespace

Reduction::Reduction(const c10d::ReduceOp& op, const char* call) {
  const auto given = static_cast<c10d::ReduceOp::RedOpType>(op);
  if (given == c10d::ReduceOp::PREMUL_SUM) {
    require(op.supplement_ != nullptr, call,
            ": PREMUL_SUM has no factor; make the op with "
            "torch.distributed._make_nccl_premul_sum(factor)");
    supplement_ = op.supplement_;
    return;
  }
  const auto* const found = std::ranges::find(kTorchOps, given);
  require_type(found != kTorchOps.end(), call,
               ": the op is not supported; pass one of torch.distributed.ReduceOp");
  op_ = static_cast<ReduceOp>(found - kTorchOps.begin());
}

DType Reduction::dtype(const at::Tensor& t, const ArgumentName& label) const {
  const DType dtype = dtype_of(t, label);
  check_op(dtype, op_, label.call);
  return dtype;
}

Binder::Fill Reduction::scaled(const at::Tensor& t, const ArgumentName& label) const {
  const at::ScalarType type = t.scalar_type();
  require_type(type != at::kBool, label.call, ": PREMUL_SUM is not defined for bool; pass numbers");
  const at::Scalar given = factor_of(*supplement_);
  if (at::isFloatingType(type) || at::isComplexType(type)) {
    require_type(at::isComplexType(type) || !given.isComplex(), label.call, ": PREMUL_SUM of ",
                 label, ", ", dtype_name(t), ", needs a real factor; the factor is complex");
    return product(t, given);
  }
  const double factor = given.toDouble();
  require_type(factor == static_cast<double>(static_cast<int64_t>(factor)), label.call,
               ": PREMUL_SUM of ", label, ", ", dtype_name(t),
               ", needs an integer factor; the factor is ", factor);
  return product(t, at::Scalar(static_cast<int64_t>(factor)));
}

namespace {

// This rank's part in a reduction or broadcast. Calls are in place, except that PREMUL_SUM reads
// the products from separate memory.
struct ReductionRole {
  const Reduction& reduction;
  bool reads, writes;  // whether this rank's tensor is an input, and whether it is written
  Rank root = 0;
};

void bind_all(GroupCall& call, RankAndWorld me, at::TensorList tensors, const ReductionRole& role) {
  require(!tensors.empty(), call.name, ": no tensors were passed; pass at least one");
  const bool scales = role.reduction.scales();
  Binder binder(call, me,
                {.input_blocks = 1,
                 .output_blocks = scales && role.writes,
                 .op = role.reduction.op(),
                 .root = role.root,
                 .in_place = !scales});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    if (call.sparse && t.is_sparse()) continue;
    const ArgumentName label = label_of(call, "tensors", tensors, i);
    if (call.collective != Collective::broadcast) role.reduction.dtype(t, label);
    const std::size_t request = binder.request(t, label);
    const bool reads = !role.writes || (role.reads && !scales);  // else the products are read
    const ipc::BufferSpan own = binder.bind(t, label, reads, role.writes).memory;
    binder.add(Side::input, request, 0,
               scales ? binder.compute(t, role.reduction.scaled(t, label)) : own);
    if (scales && role.writes) binder.add(Side::output, request, 0, own);
  }
  binder.finish();
  call.results.append(tensors.begin(), tensors.end());
}

}  // namespace

// The request of the sparse tensors is the first, so that they are read before a dense tensor with
// the same memory is written.
void all_reduce(GroupCall& call, RankAndWorld me, at::TensorList tensors,
                const c10d::ReduceOp& op) {
  const Reduction reduction(op, call.name);
  if (std::ranges::any_of(tensors, &at::Tensor::is_sparse))
    call.sparse = std::make_shared<SparseSums>(call, me, tensors, reduction);
  bind_all(call, me, tensors, {reduction, true, true});
  if (!call.sparse) return;
  call.requests.insert(call.requests.begin(), call.sparse->counting());
  call.fills.emplace_back([sparse = call.sparse] { sparse->coalesce(); });
}

void reduce(GroupCall& call, RankAndWorld me, at::TensorList tensors, const c10d::ReduceOp& op,
            int64_t root) {
  check_rank(root, me.world, call.name, "dst");
  bind_all(call, me, tensors,
           {Reduction(op, call.name), true, me.rank == root, static_cast<Rank>(root)});
}

void broadcast(GroupCall& call, RankAndWorld me, at::TensorList tensors, int64_t root) {
  check_rank(root, me.world, call.name, "src");
  const bool sends = me.rank == root;
  bind_all(call, me, tensors,
           {Reduction(c10d::ReduceOp::SUM, call.name), sends, !sends, static_cast<Rank>(root)});
}

namespace {

void check_dtype(const at::Tensor& t, const ArgumentName& label, const at::Tensor& other,
                 const ArgumentName& other_label) {
  require_type(t.scalar_type() == other.scalar_type(), label.call, ": ", label, " is ",
               dtype_name(t), " and ", other_label, " is ", dtype_name(other),
               "; both must have the same dtype");
}

void check_size(const at::Tensor& t, const ArgumentName& label, const at::Tensor& other,
                const ArgumentName& other_label) {
  require(t.numel() == other.numel(), label.call, ": ", label, " has ", t.numel(), " elements and ",
          other_label, " has ", other.numel(), "; both must have the same number");
}

void check_joined(const at::Tensor& joined, const ArgumentName& label, const at::Tensor& part,
                  const ArgumentName& part_label, int world) {
  require(joined.numel() == part.numel() * world, label.call, ": ", label, " has ", joined.numel(),
          " elements; it must have ", part.numel() * world, ", the ", part.numel(), " elements of ",
          part_label, " for each of ", world, " ranks");
}

void check_list(const GroupCall& call, RankAndWorld me, const Tensors& list) {
  require(static_cast<int>(list.size()) == me.world, call.name, ": a list has ", list.size(),
          " tensors; pass one for each of ", me.world, " ranks");
}

// Binds the tensors of a BlockTensors.
class BlockBinder {
 public:
  // `own`: the side on which a rank has its own block. `has_all`: this rank has the other side.
  BlockBinder(GroupCall& call, RankAndWorld me, const BlockTensors& tensors, Side own,
              RequestShape shape, bool has_all = true)
      : call_(call), me_(me), tensors_(tensors), own_(own), has_all_(has_all) {
    const std::size_t all = has_all ? me.world : 0;
    shape.input_blocks = own == Side::input ? 1 : all;
    shape.output_blocks = own == Side::output ? 1 : all;
    binder_.emplace(call, me, shape);
    if (has_all) check_numbers();
  }

  // Tensors that are written are bound first, because a lazy clone then gets memory of its own, in
  // which tensors that are read may lie, too.
  void run(const Reduction* reduction = nullptr) {
    for (std::size_t i = 0; i < tensors_.own.size(); ++i) {
      const at::Tensor& own = tensors_.own[i];
      const ArgumentName label = label_of(call_, tensors_.own_name, tensors_.own, i);
      if (reduction) reduction->dtype(own, label);
      blocks_.push_back({own, label, binder_->request(own, label)});
    }
    for (const Side side : {Side::output, Side::input})
      for (std::size_t i = 0; i < blocks_.size(); ++i)
        if (side == own_)
          bind_own(blocks_[i]);
        else if (has_all_)
          bind_all(i, reduction);
    for (const Block& block : blocks_)
      if (has_all_) binder_->share(block.own, block.all, tensors_.lists ? 1 : me_.world);
    binder_->finish();
  }

 private:
  struct Block {
    const at::Tensor& tensor;
    const ArgumentName label;
    const std::size_t request;
    Binder::Bound own = {}, all = {};  // of `all`, what has this rank's block
  };
  Side all() const { return own_ == Side::input ? Side::output : Side::input; }

  void check_numbers() const {
    const std::size_t own = tensors_.own.size();
    if (const TensorLists* const lists = tensors_.lists) {
      require(own > 0 && lists->size() == own, call_.name, ": ", lists->size(), " lists for ", own,
              " tensors; pass one list for each tensor");
      for (const Tensors& list : *lists) check_list(call_, me_, list);
      return;
    }
    const std::size_t inputs = own_ == Side::input ? own : tensors_.joined.size(),
                      outputs = own_ == Side::output ? own : tensors_.joined.size();
    require(outputs > 0 && outputs == inputs, call_.name, ": ", outputs, " outputs and ", inputs,
            " inputs; pass one output for each input");
  }

  Binder::Bound bind(Side side, const at::Tensor& t, const ArgumentName& label) {
    const Binder::Bound bound = binder_->bind(t, label, side == Side::input, side == Side::output);
    if (side == Side::output) call_.results.push_back(t);
    return bound;
  }

  void bind_own(Block& block) {
    block.own = bind(own_, block.tensor, block.label);
    binder_->add(own_, block.request, 0, block.own.memory);
  }

  void bind_all(std::size_t i, const Reduction* reduction) {
    Block& block = blocks_[i];
    const auto used = [&](const Binder::Bound& bound, const at::Tensor& t, const ArgumentName& of) {
      return reduction == nullptr || !reduction->scales()
                 ? bound.memory
                 : binder_->compute(t, reduction->scaled(t, of));
    };
    if (tensors_.lists == nullptr) {
      const at::Tensor& joined = tensors_.joined[i];
      const ArgumentName label = label_of(call_, tensors_.all_name, tensors_.joined, i);
      check_dtype(joined, label, block.tensor, block.label);
      check_joined(joined, label, block.tensor, block.label, me_.world);
      block.all = bind(all(), joined, label);
      binder_->add_all(all(), block.request, used(block.all, joined, label),
                       Sizes(me_.world, block.tensor.numel()));
      return;
    }
    for (Rank r = 0; r < me_.world; ++r) {
      const at::Tensor& part = (*tensors_.lists)[i][r];
      const ArgumentName label{call_.name, tensors_.all_name, r};
      check_dtype(part, label, block.tensor, block.label);
      if (r == me_.rank) check_size(part, label, block.tensor, block.label);
      const Binder::Bound bound = bind(all(), part, label);
      if (r == me_.rank) block.all = bound;
      binder_->add(all(), block.request, r, used(bound, part, label));
    }
  }

  GroupCall& call_;
  const RankAndWorld me_;
  const BlockTensors& tensors_;
  const Side own_;
  const bool has_all_;
  std::optional<Binder> binder_;
  c10::SmallVector<Block, 1> blocks_;
};

// Binds a call in which only the root has the blocks of all ranks. Only the sender and the receiver
// of a block know its size.
void bind_rooted(GroupCall& call, RankAndWorld me, const BlockTensors& tensors, Side own,
                 int64_t root) {
  const char* const argument = own == Side::input ? "dst" : "src";
  check_rank(root, me.world, call.name, argument);
  require(tensors.own.size() == 1, call.name, ": ", tensors.own.size(),
          own == Side::input ? " inputs" : " outputs", " were passed; pass 1");
  const bool is_root = me.rank == root;
  require(is_root || tensors.lists == nullptr || tensors.lists->empty(), call.name,
          ": this rank is not ", argument, "; pass no ", tensors.all_name);
  BlockBinder(call, me, tensors, own, {.root = static_cast<Rank>(root), .irregular = true}, is_root)
      .run();
}

}  // namespace

void all_gather(GroupCall& call, RankAndWorld me, const BlockTensors& tensors) {
  BlockBinder(call, me, tensors, Side::input, {}).run();
}

void reduce_scatter(GroupCall& call, RankAndWorld me, const BlockTensors& tensors,
                    const c10d::ReduceOp& op) {
  const Reduction reduction(op, call.name);
  BlockBinder(call, me, tensors, Side::output, {.op = reduction.op()}).run(&reduction);
}

void gather(GroupCall& call, RankAndWorld me, const BlockTensors& tensors, int64_t root) {
  bind_rooted(call, me, tensors, Side::input, root);
}

void scatter(GroupCall& call, RankAndWorld me, const BlockTensors& tensors, int64_t root) {
  bind_rooted(call, me, tensors, Side::output, root);
}

namespace {

RequestShape all_to_all_shape(RankAndWorld me) {
  const auto world = static_cast<std::size_t>(me.world);
  return {.input_blocks = world, .output_blocks = world, .irregular = true};
}

}  // namespace

void all_to_all(GroupCall& call, RankAndWorld me, const Tensors& outputs, const Tensors& inputs) {
  check_list(call, me, outputs);
  check_list(call, me, inputs);
  Binder binder(call, me, all_to_all_shape(me));
  const ArgumentName first{call.name, "output_list", 0};
  const std::size_t request = binder.request(outputs[0], first);
  for (const Side side : {Side::output, Side::input})  // as BlockBinder does
    for (Rank r = 0; r < me.world; ++r) {
      const bool writes = side == Side::output;
      const at::Tensor& t = writes ? outputs[r] : inputs[r];
      const ArgumentName label{call.name, writes ? "output_list" : "input_list", r};
      check_dtype(t, label, outputs[0], first);
      if (r == me.rank) check_size(t, label, outputs[r], {call.name, "output_list", r});
      binder.add(side, request, r, binder.bind(t, label, !writes, writes).memory);
    }
  binder.finish();
  call.results.append(outputs.begin(), outputs.end());
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
  const ArgumentName in{call.name, "input"}, out{call.name, "output"};
  check_dtype(input, in, output, out);
  const Sizes sent = split_counts(input, in, splits.input, "input_split_sizes", me.world);
  const Sizes received = split_counts(output, out, splits.output, "output_split_sizes", me.world);
  require(sent[me.rank] == received[me.rank], call.name, ": this rank sends ", sent[me.rank],
          " elements of ", in, " to itself and has room for ", received[me.rank], " in ", out,
          "; both must be equal");
  Binder binder(call, me, all_to_all_shape(me));
  const std::size_t request = binder.request(output, out);
  binder.add_all(Side::output, request, binder.bind(output, out, false, true).memory, received);
  binder.add_all(Side::input, request, binder.bind(input, in, true, false).memory, sent);
  binder.finish();
  call.results.push_back(output);
}

}  // namespace pycollect::dist
