// See binder.h. The executor gets mutable addresses; it guarantees that inputs are not written.
#include "binder.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "../../group/hasher.h"
#include "../../plan/error.h"
#include "../threads.h"

namespace pycollect::dist {
namespace {

std::byte* address(const at::Tensor& t, bool writes) {
  return static_cast<std::byte*>(writes ? t.mutable_data_ptr()
                                        : const_cast<void*>(t.const_data_ptr()));
}

}  // namespace

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

void Binder::check_same_memory_kind(const at::Tensor& t, bool on_device,
                                    const ArgumentName& label) {
  require(on_device == (call_.staging != nullptr), label.call, ": ", label, " is on ", t.device(),
          " and the call's first tensor is ", on_device ? "in host memory" : "on a GPU",
          "; the tensors of one call must be all in host memory or all on GPUs");
}

// Returns the address, in the caller's tensor, of the data that the executor has at `host`.
const std::byte* Binder::origin(const std::byte* host) const {
  for (const StagedRange& s : staged_ranges_)
    if (s.host <= host && host < s.host + s.bytes) return s.tensor + (host - s.host);
  return host;
}

ipc::BufferSegment Binder::add_tensor(const at::Tensor& t, bool reads, bool writes) {
  if (call_.written != nullptr) call_.held.push_back(t);
  const ipc::BufferSegment span = call_.staging->add_tensor(t, reads, writes);
  if (t.is_contiguous()) staged_ranges_.push_back({span.base, address(t, writes), t.nbytes()});
  return span;
}

ipc::BufferSegment Binder::bind(const at::Tensor& t, const ArgumentName& label, bool reads,
                                bool writes) {
  const AccessMode use = writes ? AccessMode::write : AccessMode::read;
  const bool on_device = check_operand(t, use, label, *call_.devices);
  check_same_memory_kind(t, on_device, label);
  extents_.push_back(extent(t, use, label));
  if (on_device) return add_tensor(t, reads, writes);
  if (t.is_contiguous()) {
    call_.held.push_back(t);
    return {address(t, writes), static_cast<std::size_t>(t.numel())};
  }
  at::Tensor dense{at::detail::empty_cpu(t.sizes(), t.scalar_type())};
  if (reads) call_.fills.push_back([dense, t] { copy_strided(dense, t); });
  if (writes) call_.copies.emplace_back(t, dense);
  return keep(std::move(dense));
}

ipc::BufferSegment Binder::compute(const at::Tensor& like, Fill fill) {
  if (call_.staging) {
    TorchRuntime& torch = call_.staging->devices().torch();
    const at::Tensor temporary = torch.empty(like.sizes(), like.scalar_type(), like.device());
    call_.fills.push_back([&torch, temporary, like, fill = std::move(fill)] {
      torch.compute(temporary, like, fill);
    });
    return add_tensor(temporary, true, false);
  }
  at::Tensor dense{at::detail::empty_cpu(like.sizes(), like.scalar_type())};
  call_.fills.push_back([dense, fill = std::move(fill)] { fill(dense); });
  return keep(std::move(dense));
}

ipc::BufferSegment Binder::keep(at::Tensor t) {
  call_.held.push_back(std::move(t));
  const at::Tensor& held = call_.held.back();
  return {address(held, true), static_cast<std::size_t>(held.numel())};
}

ipc::BufferSegment Binder::read(const at::Tensor& t, const ArgumentName& label) {
  return bind(t, label, true, false);
}
ipc::BufferSegment Binder::write(const at::Tensor& t, const ArgumentName& label) {
  return bind(t, label, false, true);
}
ipc::BufferSegment Binder::update(const at::Tensor& t, const ArgumentName& label) {
  return bind(t, label, true, true);
}

ipc::BufferSegment Binder::read_aliasing(const at::Tensor& t, const ArgumentName& label,
                                         const ipc::BufferSegment& place, std::size_t first) {
  const ipc::BufferSegment span = read(t, label);
  const auto item = static_cast<std::size_t>(t.element_size());
  const std::byte* own = origin(span.base) + first * item;
  if (own != origin(place.base) || first + place.count > span.count) return span;
  ArgumentRange before = extents_.back(), after = before;
  before.end = own;
  after.begin = own + place.count * item;
  extents_.back() = before;
  extents_.push_back(after);
  return span;
}

ipc::BufferSegment Binder::read_whole_aliasing(const at::Tensor& t, const ArgumentName& label,
                                               const ipc::BufferSegment& place) {
  const ipc::BufferSegment span = read(t, label);
  if (origin(span.base) == origin(place.base) && span.count == place.count) extents_.pop_back();
  return span;
}

std::size_t Binder::request(const at::Tensor& t, const ArgumentName& label) {
  const DType dtype = moved_dtype_of(t, label);
  const uint8_t number = dtype_number(t, label);
  std::size_t i = 0;
  while (i < call_.requests.size() && call_.requests[i].dtype_number() != number) ++i;
  if (i == call_.requests.size()) {
    FoldOptions options{.world = me_.world};
    if (item_bytes(dtype) == 1) options.float8 = float8_specials();
    call_.requests.push_back({.collective = call_.collective,
                              .dtype = dtype,
                              .moved_dtype = number,
                              .op = form_.op,
                              .root = form_.root,
                              .algorithm = call_.algorithm,
                              .options = options,
                              .in_place = form_.in_place,
                              .irregular = form_.irregular,
                              .tensors = 0});
    RequestBuffers& part = parts_.emplace_back();
    part.input.resize(form_.input_blocks);
    part.output.resize(form_.output_blocks);
  }
  ++call_.requests[i].tensors;
  return i;
}

void Binder::add_input(std::size_t request, std::size_t block, ipc::BufferSegment span) {
  parts_[request].input[block].push_back(span);
}
void Binder::add_output(std::size_t request, std::size_t block, ipc::BufferSegment span) {
  parts_[request].output[block].push_back(span);
}

ipc::BufferSegment Binder::part(std::size_t request, const ipc::BufferSegment& whole,
                                std::size_t block) const {
  const std::size_t count = whole.count / me_.world;
  return {whole.base + block * count * item_bytes(call_.requests[request].dtype), count};
}

void Binder::add_whole_input(std::size_t request, const ipc::BufferSegment& span) {
  for (Rank r = 0; r < me_.world; ++r) add_input(request, r, part(request, span, r));
}
void Binder::add_whole_output(std::size_t request, const ipc::BufferSegment& span) {
  for (Rank r = 0; r < me_.world; ++r) add_output(request, r, part(request, span, r));
}

// Concatenates the blocks of a call buffer and merges segments that are adjacent in memory.
ipc::CallBuffer Binder::joined(const Blocks& blocks, std::size_t item) {
  ipc::CallBuffer buffer{{}, Sizes(blocks.size())};
  ipc::Hasher cuts;
  bool cut = false;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    cut |= blocks[b].size() > 1;
    cuts.add(b);
    for (const ipc::BufferSegment& s : blocks[b]) {
      cuts.add(s.count);
      buffer.blocks[b] += s.count;
      if (s.count == 0) continue;
      if (!buffer.segments.empty() &&
          buffer.segments.back().base + buffer.segments.back().count * item == s.base)
        buffer.segments.back().count += s.count;
      else
        buffer.segments.push_back(s);
    }
  }
  if (cut) buffer.cuts = cuts.value();
  return buffer;
}

void Binder::finish() {
  for (std::size_t i = 0; i < call_.requests.size(); ++i) {
    ipc::CollectiveRequest& r = call_.requests[i];
    r.input = joined(parts_[i].input, item_bytes(r.dtype));
    r.output = joined(parts_[i].output, item_bytes(r.dtype));
  }
  check_disjoint(extents_);
  if (call_.staging) begin_copy_in();
  if (call_.written == nullptr) return;
  for (const ArgumentRange& e : extents_)
    if (e.written) call_.written->add(e.begin, e.end);
}

bool Binder::touches_written() const {
  if (call_.written == nullptr) return false;
  return std::any_of(extents_.begin(), extents_.end(),
                     [&](const ArgumentRange& e) { return call_.written->touch(e.begin, e.end); });
}

// Copies device tensors into staging: now, or, if an earlier call of the list writes them, when
// this call runs.
void Binder::begin_copy_in() {
  if (touches_written()) {
    for (at::Device d : call_.staging->on())
      call_.requested_at.push_back(call_.staging->devices().record_event(d));
    return;
  }
  for (const auto& fill : std::exchange(call_.fills, {})) fill();
  call_.staging->begin_copy_in();
}

}  // namespace pycollect::dist
