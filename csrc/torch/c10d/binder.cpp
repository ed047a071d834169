// See binder.h. The executor's addresses could be written to; that what is only read is not, is its
// own promise.
#include "binder.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "../../plan/error.h"
#include "../../shm/hashing.h"
#include "../job.h"
#include "../threads.h"

namespace pycollect::dist {
namespace {

std::byte* address(const at::Tensor& t, bool writes) {
  return static_cast<std::byte*>(writes ? t.mutable_data_ptr()
                                        : const_cast<void*>(t.const_data_ptr()));
}

}  // namespace

bool check_operand(const at::Tensor& t, Use use, const Label& label, Devices& devices) {
  if (devices.serves(t)) {
    check_memory(t, use, label);
    require(!devices.is_capturing(t.device()), label.call, ": ", label, " is on ", t.device(),
            ", whose current stream is under capture, and a CUDA graph cannot hold what other "
            "processes do; call it outside of the capture");
    return true;
  }
  require(!t.is_cuda(), label.call, ": ", label, " is on ", t.device(),
          " and ranks that are processes share host memory only; make the group with "
          "'cpu:pycollect,cuda:nccl', which leaves CUDA tensors to NCCL");
  check_memory(t, use, label);
  require(t.is_cpu(), label.call, ": ", label, " is on ", t.device(), "; pass a CPU tensor");
  return false;
}

void Binder::check_together(const at::Tensor& t, bool on_device, const Label& label) {
  require(on_device == (call_.passage != nullptr), label.call, ": ", label, " is on ", t.device(),
          " and the call's first tensor is ", on_device ? "in host memory" : "on a GPU",
          "; the tensors of one call are all in host memory or all on GPUs");
}

// Where a tensor itself has what the executor finds at `host`.
const std::byte* Binder::origin(const std::byte* host) const {
  for (const StandIn& s : stand_ins_)
    if (s.host <= host && host < s.host + s.bytes) return s.tensor + (host - s.host);
  return host;
}

shm::Span Binder::enter(const at::Tensor& t, bool reads, bool writes) {
  if (call_.written != nullptr) call_.held.push_back(t);
  const shm::Span span = call_.passage->enter(t, reads, writes);
  if (t.is_contiguous()) stand_ins_.push_back({span.base, address(t, writes), t.nbytes()});
  return span;
}

shm::Span Binder::bind(const at::Tensor& t, const Label& label, bool reads, bool writes) {
  const Use use = writes ? Use::write : Use::read;
  const bool on_device = check_operand(t, use, label, *call_.devices);
  check_together(t, on_device, label);
  extents_.push_back(extent(t, use, label));
  if (on_device) return enter(t, reads, writes);
  if (t.is_contiguous()) {
    call_.held.push_back(t);
    return {address(t, writes), static_cast<std::size_t>(t.numel())};
  }
  at::Tensor dense{at::detail::empty_cpu(t.sizes(), t.scalar_type())};
  if (reads) call_.fills.push_back([dense, t] { lay(dense, t); });
  if (writes) call_.copies.emplace_back(t, dense);
  return keep(std::move(dense));
}

shm::Span Binder::compute(const at::Tensor& like, Fill fill) {
  if (call_.passage) {
    const at::Tensor there = at::empty_like(like);
    call_.fills.push_back([&devices = call_.passage->devices(), there, like,
                           fill = std::move(fill)] { devices.compute(there, like, fill); });
    return enter(there, true, false);
  }
  at::Tensor dense{at::detail::empty_cpu(like.sizes(), like.scalar_type())};
  call_.fills.push_back([dense, fill = std::move(fill)] { fill(dense); });
  return keep(std::move(dense));
}

shm::Span Binder::keep(at::Tensor t) {
  call_.held.push_back(std::move(t));
  const at::Tensor& held = call_.held.back();
  return {address(held, true), static_cast<std::size_t>(held.numel())};
}

shm::Span Binder::read(const at::Tensor& t, const Label& label) {
  return bind(t, label, true, false);
}
shm::Span Binder::write(const at::Tensor& t, const Label& label) {
  return bind(t, label, false, true);
}
shm::Span Binder::update(const at::Tensor& t, const Label& label) {
  return bind(t, label, true, true);
}

shm::Span Binder::read_beside(const at::Tensor& t, const Label& label, const shm::Span& place,
                              std::size_t first) {
  const shm::Span span = read(t, label);
  const auto item = static_cast<std::size_t>(t.element_size());
  const std::byte* own = origin(span.base) + first * item;
  if (own != origin(place.base) || first + place.count > span.count) return span;
  Extent before = extents_.back(), after = before;
  before.end = own;
  after.begin = own + place.count * item;
  extents_.back() = before;
  extents_.push_back(after);
  return span;
}

shm::Span Binder::read_inside(const at::Tensor& t, const Label& label, const shm::Span& place) {
  const shm::Span span = read(t, label);
  if (origin(span.base) == origin(place.base) && span.count == place.count) extents_.pop_back();
  return span;
}

std::size_t Binder::request(DType dtype) {
  std::size_t i = 0;
  while (i < call_.requests.size() && call_.requests[i].dtype != dtype) ++i;
  if (i == call_.requests.size()) {
    FoldOptions options{.world = seat_.world};
    if (item_bytes(dtype) == 1) options.float8 = float8_rounding();
    call_.requests.push_back({.collective = call_.collective,
                              .dtype = dtype,
                              .op = form_.op,
                              .root = form_.root,
                              .algorithm = call_.algorithm,
                              .options = options,
                              .in_place = form_.in_place,
                              .irregular = form_.irregular,
                              .tensors = 0});
    parts_.push_back({Blocks(form_.input_blocks), Blocks(form_.output_blocks)});
  }
  ++call_.requests[i].tensors;
  return i;
}

void Binder::add_input(std::size_t request, std::size_t block, shm::Span span) {
  parts_[request].input[block].push_back(span);
}
void Binder::add_output(std::size_t request, std::size_t block, shm::Span span) {
  parts_[request].output[block].push_back(span);
}

shm::Span Binder::part(std::size_t request, const shm::Span& whole, std::size_t block) const {
  const std::size_t count = whole.count / seat_.world;
  return {whole.base + block * count * item_bytes(call_.requests[request].dtype), count};
}

void Binder::add_whole_input(std::size_t request, const shm::Span& span) {
  for (Rank r = 0; r < seat_.world; ++r) add_input(request, r, part(request, span, r));
}
void Binder::add_whole_output(std::size_t request, const shm::Span& span) {
  for (Rank r = 0; r < seat_.world; ++r) add_output(request, r, part(request, span, r));
}

// Neighbours in memory are one span.
shm::Side Binder::joined(const Blocks& blocks, std::size_t item) {
  shm::Side side{{}, Sizes(blocks.size())};
  shm::Hashing cuts;
  bool cut = false;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    cut |= blocks[b].size() > 1;
    cuts.add(b);
    for (const shm::Span& s : blocks[b]) {
      cuts.add(s.count);
      side.blocks[b] += s.count;
      if (s.count == 0) continue;
      if (!side.spans.empty() && side.spans.back().base + side.spans.back().count * item == s.base)
        side.spans.back().count += s.count;
      else
        side.spans.push_back(s);
    }
  }
  if (cut) side.cuts = cuts.value();
  return side;
}

void Binder::finish() {
  for (std::size_t i = 0; i < call_.requests.size(); ++i) {
    shm::Request& r = call_.requests[i];
    r.input = joined(parts_[i].input, item_bytes(r.dtype));
    r.output = joined(parts_[i].output, item_bytes(r.dtype));
    r.on_gpus = call_.passage && call_.passage->transport() != nullptr;
  }
  check_disjoint(extents_);
  if (call_.passage) depart();
  if (call_.written == nullptr) return;
  for (const Extent& e : extents_)
    if (e.written) call_.written->add(e.begin, e.end);
}

bool Binder::touches_written() const {
  if (call_.written == nullptr) return false;
  return std::any_of(extents_.begin(), extents_.end(),
                     [&](const Extent& e) { return call_.written->touch(e.begin, e.end); });
}

// Now; or, of what an earlier call of the list writes first, in its turn.
void Binder::depart() {
  if (touches_written()) {
    for (at::Device d : call_.passage->on())
      call_.asked.push_back(call_.passage->devices().mark(d));
    return;
  }
  for (const auto& fill : std::exchange(call_.fills, {})) fill();
  call_.passage->depart();
}

}  // namespace pycollect::dist
