// See sparse.h.
#include "sparse.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "../../plan/error.h"
#include "../../rank_executor/fingerprint.h"
#include "../threads.h"
#include "rank_communicator.h"

namespace pycollect::dist {
namespace {

at::SparseTensorImpl& impl_of(const at::Tensor& t) {
  return static_cast<at::SparseTensorImpl&>(*t.unsafeGetTensorImpl());
}

FoldOptions options_for(int world) {
  FoldOptions options{.world = world};
  options.float8 = float8_specials();
  return options;
}

// Copies a matrix of `rows` times `columns` indices, given by its strides, to a contiguous one.
void copy_indices(int64_t* to, const int64_t* from, int64_t rows, int64_t columns,
                  int64_t row_stride, int64_t column_stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) *to++ = from[r * row_stride + c * column_stride];
}

// torch checks neither the range of indices nor, in a tensor that is marked as coalesced, their
// order.
void check_indices(const at::Tensor& t, const ArgumentName& label) {
  const at::Tensor indices = impl_of(t).indices().cpu();
  const int64_t dims = indices.size(0), count = indices.size(1);
  std::vector<int64_t> index(dims), last(dims, -1);
  for (int64_t i = 0; i < count; ++i, index.swap(last)) {
    copy_indices(index.data(), indices.const_data_ptr<int64_t>() + i * indices.stride(1), dims, 1,
                 indices.stride(0), 0);
    for (int64_t d = 0; d < dims; ++d)
      require(0 <= index[d] && index[d] < t.size(d), label.call, ": ", label, " of shape ",
              t.sizes(), " has the index ", index[d], " in dimension ", d);
    require(!impl_of(t).coalesced() || i == 0 || last < index, label.call, ": ", label,
            " is marked as coalesced, but its indices are not sorted and unique; make it without "
            "is_coalesced=True");
  }
}

void check_sparse(const at::Tensor& t, const ArgumentName& label, DeviceOps& devices) {
  require(!t.unsafeGetTensorImpl()->is_python_dispatch() && (t.is_cpu() || devices.has(t.device())),
          label.call, ": ", label, " is sparse and on ", t.device(),
          ", or has no memory of its own; pass a tensor on the CPU, or on a GPU that this build "
          "supports");
  require(t.is_cpu() || !devices.is_capturing(t.device()), label.call, ": ", label, " is on ",
          t.device(), ", whose current stream is under capture; call it outside of the capture");
  require_type(impl_of(t).coalesced() || !at::isFloat8Type(t.scalar_type()), label.call, ": ",
               label, " is a sparse tensor of ", dtype_name(t),
               ", which torch cannot coalesce; pass one that is coalesced");
  check_memory(impl_of(t).indices(), AccessMode::read, label);
  check_memory(impl_of(t).values(), AccessMode::read, label);
  check_indices(t, label);
}

at::Tensor dense_on_host(const at::Tensor& t) {
  const at::Tensor host = t.cpu();
  if (host.is_contiguous()) return host;
  at::Tensor dense{at::detail::empty_cpu(host.sizes(), host.scalar_type())};
  dense.copy_(host);
  return dense;
}

}  // namespace

SparseSums::SparseSums(const GroupCall& call, RankAndWorld me, at::TensorList tensors,
                       const Reduction& reduction)
    : me_(me), op_(reduction.op()), options_(options_for(me.world)) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const ArgumentName label = label_of(call, "tensors", tensors, i);
    if (!tensors[i].is_sparse()) continue;
    require(!reduction.scales() && (op_ == ReduceOp::sum || op_ == ReduceOp::avg), call.name, ": ",
            label, " is sparse, and the op is ", reduction.scales() ? "PREMUL_SUM" : name(op_),
            "; sparse tensors have only sum and avg, in which a missing entry adds nothing");
    require(call.order == FoldOrder::rank, call.name, ": ", label,
            " is sparse, and the group's option is order='tree'; sparse tensors are added in rank "
            "order only, so pass a dense tensor, or use another group");
    for (const SparseOperand& other : operands_)
      require(!tensors[i].is_same(other.tensor), call.name, ": ", label,
              " occurs twice in the list; pass different tensors");
    add(tensors[i], label, reduction.dtype(tensors[i], label), *call.communicator->devices());
  }
  own_counts_.resize(operands_.size());
  counts_.resize(operands_.size() * me.world);
  describe_form(op_);
}

void SparseSums::add(const at::Tensor& t, const ArgumentName& label, DType dtype,
                     DeviceOps& devices) {
  check_sparse(t, label, devices);
  SparseOperand operand{.tensor = t, .dtype = dtype, .dims = t.sparse_dim(), .elements = 1};
  for (int64_t d = t.sparse_dim(); d < t.dim(); ++d) operand.elements *= t.size(d);
  if (!t.is_cpu())
    operand.stream = c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device());
  operands_.push_back(std::move(operand));
}

void SparseSums::describe_form(ReduceOp op) {
  ipc::Hasher hash;
  form_ = {.dtype = operands_.front().dtype, .op = op, .elements = 0, .shapes = 0};
  hash.add(static_cast<uint64_t>(op));
  for (const SparseOperand& operand : operands_) {
    form_.elements += operand.tensor.numel();
    hash.add(static_cast<uint64_t>(operand.dtype) << 32 | static_cast<uint64_t>(operand.dims));
    hash.add(operand.tensor.dim());
    for (const int64_t size : operand.tensor.sizes()) hash.add(size);
  }
  form_.shapes = hash.value();
}

ipc::CollectiveRequest SparseSums::counting() {
  const auto span = [](std::vector<int64_t>& v) {
    return ipc::BufferSpan{reinterpret_cast<std::byte*>(v.data()), v.size()};
  };
  own_counts_memory_ = {{span(own_counts_)}, {own_counts_.size()}};
  counts_memory_ = {{span(counts_)}, Sizes(me_.world, own_counts_.size())};
  return {.collective = Collective::all_gather,
          .dtype = DType::i64,
          .options = options_,
          .input = own_counts_memory_.view(),
          .output = counts_memory_.view(),
          .tensors = operands_.size(),
          .sparse = &form_};
}

SparseSums::EntryTensors SparseSums::SparseOperand::empty(int64_t count) const {
  std::vector<int64_t> sizes = tensor.sizes().slice(dims).vec();
  sizes.insert(sizes.begin(), count);
  return {at::Tensor{at::detail::empty_cpu({count, dims}, at::kLong)},
          at::Tensor{at::detail::empty_cpu(sizes, tensor.scalar_type())}};
}

cpu::EntryList SparseSums::SparseOperand::list(const EntryTensors& entries, int64_t first,
                                               int64_t count) const {
  return {entries.indices.const_data_ptr<int64_t>() + first * dims,
          static_cast<const std::byte*>(entries.values.const_data_ptr()) + first * value_bytes(),
          count};
}

// A tensor on a device is copied on the caller's stream, for which the host waits.
void SparseSums::coalesce() {
  for (std::size_t i = 0; i < operands_.size(); ++i) {
    SparseOperand& operand = operands_[i];
    run_operators([&] {
      const c10::OptionalStreamGuard stream(operand.stream);
      const at::Tensor coalesced = operand.tensor.coalesce();
      const at::Tensor indices = impl_of(coalesced).indices().cpu();
      operand.own = {at::Tensor{at::detail::empty_cpu({indices.size(1), operand.dims}, at::kLong)},
                     dense_on_host(impl_of(coalesced).values())};
      copy_indices(operand.own.indices.mutable_data_ptr<int64_t>(),
                   indices.const_data_ptr<int64_t>(), indices.size(1), operand.dims,
                   indices.stride(1), indices.stride(0));
    });
    own_counts_[i] = operand.own.indices.size(0);
  }
}

// The block of a rank has the indices and the values of its entries, tensor after tensor.
ipc::CollectiveRequest SparseSums::exchange() {
  own_memory_ = {{}, Sizes(1)};
  all_memory_ = {{}, Sizes(me_.world)};
  const auto add = [](ipc::CallBufferMemory& buffer, std::size_t block,
                      const SparseOperand& operand, const cpu::EntryList& list) {
    const auto count = static_cast<std::size_t>(list.count);
    const auto span = [&](const void* base, std::size_t bytes) {
      buffer.blocks[block] += bytes;
      if (bytes > 0)
        buffer.spans.push_back({static_cast<std::byte*>(const_cast<void*>(base)), bytes});
    };
    span(list.indices, count * operand.index_bytes());
    span(list.values, count * operand.value_bytes());
  };
  std::vector<int64_t> places(operands_.size());
  for (std::size_t i = 0; i < operands_.size(); ++i) {
    SparseOperand& operand = operands_[i];
    int64_t all = 0;
    for (Rank r = 0; r < me_.world; ++r) all += count(r, i);
    operand.all = operand.empty(all);
    add(own_memory_, 0, operand, operand.list(operand.own, 0, own_counts_[i]));
  }
  for (Rank r = 0; r < me_.world; ++r)
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      add(all_memory_, r, operands_[i],
          operands_[i].list(operands_[i].all, places[i], count(r, i)));
      places[i] += count(r, i);
    }
  return {.collective = Collective::all_gather,
          .dtype = DType::u8,
          .options = options_,
          .input = own_memory_.view(),
          .output = all_memory_.view(),
          .tensors = operands_.size(),
          .sparse = &form_};
}

// Returns indices as torch has them: [sparse dimension][entry].
SparseSums::EntryTensors SparseSums::fold(const SparseOperand& operand,
                                          std::vector<cpu::EntryList> ranks) const {
  const cpu::SparseFold fold(
      std::move(ranks), {operand.dims, static_cast<std::size_t>(operand.elements), operand.dtype});
  EntryTensors result = operand.empty(fold.count());
  result.indices = at::Tensor{at::detail::empty_cpu({operand.dims, fold.count()}, at::kLong)};
  fold.write(result.indices.mutable_data_ptr<int64_t>(),
             static_cast<std::byte*>(result.values.mutable_data_ptr()), op_, options_);
  return result;
}

namespace {

// A result on a device is copied there before this function returns.
void replace_entries(const at::Tensor& t, const std::optional<c10::Stream>& stream,
                     const at::Tensor& indices, const at::Tensor& values) {
  run_operators([&] {
    const c10::OptionalStreamGuard guard(stream);
    impl_of(t).set_indices_and_values_unsafe(indices.to(t.device()), values.to(t.device()));
    impl_of(t).set_coalesced(true);
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  });
}

}  // namespace

void SparseSums::finish(const std::vector<SparseSums*>& here) {
  const SparseSums& first = *here.front();
  std::vector<EntryTensors> results;  // of all operands, before any tensor changes
  for (std::size_t i = 0; i < first.operands_.size(); ++i) {
    const SparseOperand& operand = first.operands_[i];
    const bool exchanged = operand.all.indices.defined();
    std::vector<cpu::EntryList> ranks;
    int64_t begin = 0;
    for (Rank r = 0; r < first.me_.world; begin += first.count(r++, i))
      ranks.push_back(exchanged
                          ? operand.list(operand.all, begin, first.count(r, i))
                          : operand.list(here[r]->operands_[i].own, 0, here[r]->own_counts_[i]));
    results.push_back(first.fold(operand, std::move(ranks)));
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto& [indices, values] = results[i];
    for (SparseSums* const of_rank : here) {
      SparseOperand& replaced = of_rank->operands_[i];
      const bool last = of_rank == here.back();
      replace_entries(replaced.tensor, replaced.stream, last ? indices : indices.clone(),
                      last ? values : values.clone());
    }
    for (SparseSums* const of_rank : here)
      of_rank->operands_[i].own = of_rank->operands_[i].all = {};
  }
}

}  // namespace pycollect::dist
