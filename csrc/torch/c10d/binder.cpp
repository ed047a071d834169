// See binder.h. The executor gets mutable addresses; it guarantees that inputs are not written.
#include "binder.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "../../plan/error.h"
#include "../../rank_executor/fingerprint.h"
#include "../threads.h"
#include "rank_communicator.h"

namespace pycollect::dist {
bool check_operand(const at::Tensor& t, AccessMode use, const ArgumentName& label,
                   DeviceOps& devices) {
  if (devices.serves(t)) {
    check_memory(t, use, label);
    require(!devices.is_capturing(t.device()), label.call, ": ", label, " is on ", t.device(),
            ", whose current stream is under capture, and a CUDA graph cannot record a "
            "collective between processes; call it outside of the capture");
    return true;
  }
  require(!t.is_cuda(), label.call, ": ", label, " is on ", t.device(),
          ", and this build has no CUDA part; make the group with "
          "'cpu:pycollect,cuda:nccl', which leaves CUDA tensors to NCCL");
  check_memory(t, use, label);
  require(t.is_cpu(), label.call, ": ", label, " is on ", t.device(), "; pass a CPU tensor");
  return false;
}

ArgumentName label_of(const GroupCall& call, const char* list, at::TensorList all, std::size_t i) {
  return {call.name, list, all.size() == 1 ? -1 : static_cast<int>(i)};
}

ipc::BufferSpan Binder::stage(const at::Tensor& t, bool reads, bool writes) {
  if (call_.written != nullptr) call_.held.push_back(t);
  return call_.staging->add_tensor(t, reads, writes);
}

Binder::Bound Binder::bind(const at::Tensor& t, const ArgumentName& label, bool reads,
                           bool writes) {
  const AccessMode use = writes ? AccessMode::write : AccessMode::read;
  const bool on_device = check_operand(t, use, label, *call_.communicator->devices());
  if (on_device && extents_.empty()) call_.staging = call_.communicator->begin_staging();
  require(on_device == (call_.staging != nullptr), label.call, ": ", label, " is on ", t.device(),
          " and the call's first tensor is ", on_device ? "in host memory" : "on a GPU",
          "; the tensors of one call must be all in host memory or all on GPUs");
  Bound bound{{}, extents_.size(), t.is_contiguous()};
  extents_.push_back(extent(t, use, label));
  if (on_device) {
    bound.memory = stage(t, reads, writes);
  } else if (bound.contiguous) {
    if (!writes) call_.held.push_back(t);  // a result is kept as such
    bound.memory = {const_cast<std::byte*>(extents_.back().begin),
                    static_cast<std::size_t>(t.numel())};
  } else {
    at::Tensor dense{at::detail::empty_cpu(t.sizes(), t.scalar_type())};
    if (reads) call_.fills.push_back([dense, t] { copy_strided(dense, t); });
    if (writes) call_.copies.emplace_back(t, dense);
    bound.memory = keep(std::move(dense));
  }
  return bound;
}

// The range that is read becomes what of it is not written.
void Binder::share(const Bound& block, const Bound& all, int parts) {
  if (!block.contiguous || !all.contiguous) return;
  const ArgumentExtent whole = extents_[all.extent];
  ArgumentExtent& one = extents_[block.extent];
  const std::ptrdiff_t bytes = (whole.end - whole.begin) / parts;
  const std::byte* const own = whole.begin + (parts > 1 ? me_.rank : 0) * bytes;
  if (one.begin != own || one.end != own + bytes) return;
  if (whole.written) {
    one.end = one.begin;
    return;
  }
  extents_[all.extent].end = own;
  extents_.push_back({own + bytes, whole.end, false, whole.label});
}

ipc::BufferSpan Binder::compute(const at::Tensor& like, Fill fill) {
  if (call_.staging) {
    TorchRuntime& torch = call_.staging->devices().torch();
    const at::Tensor temporary = torch.empty(like.sizes(), like.scalar_type(), like.device());
    call_.fills.push_back([&torch, temporary, like, fill = std::move(fill)] {
      torch.compute(temporary, like, fill);
    });
    return stage(temporary, true, false);
  }
  at::Tensor dense{at::detail::empty_cpu(like.sizes(), like.scalar_type())};
  call_.fills.push_back([dense, fill = std::move(fill)] { fill(dense); });
  return keep(std::move(dense));
}

ipc::BufferSpan Binder::keep(at::Tensor t) {
  call_.held.push_back(std::move(t));
  const at::Tensor& held = call_.held.back();
  return {static_cast<std::byte*>(held.mutable_data_ptr()), static_cast<std::size_t>(held.numel())};
}

std::size_t Binder::request(const at::Tensor& t, const ArgumentName& label) {
  const DType dtype = moved_dtype_of(t, label);
  const uint8_t number = dtype_number(t, label);
  std::size_t i = 0;
  while (i < call_.requests.size() && call_.requests[i].dtype_number() != number) ++i;
  if (i == call_.requests.size()) {
    ipc::CollectiveRequest& added = call_.requests.emplace_back();
    added.collective = call_.collective;
    added.dtype = dtype;
    added.moved_dtype = number;
    added.op = shape_.op;
    added.root = shape_.root;
    added.algorithm = call_.algorithm;
    added.options.world = me_.world;
    added.options.order = call_.order;
    if (item_bytes(dtype) == 1) added.options.float8 = float8_specials();
    added.in_place = shape_.in_place;
    added.irregular = shape_.irregular;
    added.tensors = 0;
  }
  ++call_.requests[i].tensors;
  return i;
}

void Binder::add(Side side, std::size_t request, std::size_t block, const ipc::BufferSpan& memory) {
  parts_[static_cast<int>(side)].push_back({request, block, memory});
}

void Binder::add_all(Side side, std::size_t request, ipc::BufferSpan memory, const Sizes& blocks) {
  const std::size_t item = item_bytes(call_.requests[request].dtype);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    memory.count = blocks[b];
    add(side, request, b, memory);
    memory.base += memory.count * item;
  }
}

// Concatenates the blocks of a call buffer and merges spans that are adjacent in memory.
ipc::CallBuffer Binder::join(Side side, std::size_t request, std::size_t blocks) {
  if (blocks == 0) return {};
  const std::size_t item = item_bytes(call_.requests[request].dtype);
  auto& [spans, sizes] = call_.memory;
  const std::size_t first = spans.size(), block = sizes.size();
  sizes.resize(block + blocks);
  ipc::Hasher cuts;
  for (const BlockPart& part : parts_[static_cast<int>(side)]) {
    if (part.request != request) continue;
    const auto [base, count] = part.memory;
    cuts.add(part.block);
    cuts.add(count);
    sizes[block + part.block] += count;
    if (count == 0) continue;
    if (spans.size() > first && spans.back().base + spans.back().count * item == base)
      spans.back().count += count;
    else
      spans.push_back(part.memory);
  }
  return {std::span(spans).subspan(first), std::span(sizes).subspan(block),
          call_.requests[request].tensors > 1 ? cuts.value() : 0};
}

void Binder::finish() {
  for (BlockParts& parts : parts_)
    if (!std::ranges::is_sorted(parts, {}, &BlockPart::block))
      std::ranges::stable_sort(parts, {}, &BlockPart::block);
  // So that the memory of one buffer does not move when the next one is added.
  call_.memory.spans.reserve(parts_[0].size() + parts_[1].size());
  call_.memory.blocks.reserve(call_.requests.size() * (shape_.input_blocks + shape_.output_blocks));
  for (std::size_t i = 0; i < call_.requests.size(); ++i) {
    call_.requests[i].input = join(Side::input, i, shape_.input_blocks);
    call_.requests[i].output = join(Side::output, i, shape_.output_blocks);
  }
  check_disjoint(extents_);
  if (call_.staging) begin_copy_in();
  if (call_.written == nullptr) return;
  for (const ArgumentExtent& e : extents_)
    if (e.written) call_.written->add(e.begin, e.end);
}

bool Binder::overlaps_earlier_writes() const {
  if (call_.written == nullptr) return false;
  return std::any_of(extents_.begin(), extents_.end(),
                     [&](const ArgumentExtent& e) { return call_.written->touch(e.begin, e.end); });
}

// Copies device tensors into staging: now, or, if an earlier call of the list writes them, when
// this call runs.
void Binder::begin_copy_in() {
  if (overlaps_earlier_writes()) {
    for (at::Device d : call_.staging->on())
      call_.requested_at.push_back(call_.staging->devices().record_event(d));
    return;
  }
  for (const auto& fill : std::exchange(call_.fills, {})) fill();
  call_.staging->begin_copy_in();
}

}  // namespace pycollect::dist
