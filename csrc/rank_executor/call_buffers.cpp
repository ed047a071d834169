// See call_buffers.h. Checks that a request's buffers fit its collective, and divides them.
#include "call_buffers.h"

#include <algorithm>
#include <numeric>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// Alignment of chunks in a buffer: a cache line, so that no SIMD vector is split between chunks.
constexpr std::size_t kLine = 64;

std::size_t sum(const Sizes& blocks) {
  return std::accumulate(blocks.begin(), blocks.end(), std::size_t{0});
}

bool is_even(const Sizes& blocks) {
  return std::adjacent_find(blocks.begin(), blocks.end(), std::not_equal_to<>()) == blocks.end();
}

}  // namespace

BlockContent input_of(Collective c, bool in_place) {
  switch (c) {
    case Collective::all_gather:
    case Collective::gather:
      return in_place ? BlockContent::all_blocks : BlockContent::own_block;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
    case Collective::scatter:
      return BlockContent::all_blocks;
    default:
      return BlockContent::nothing_in_blocks;
  }
}

BlockContent output_of(Collective c, bool in_place) {
  switch (c) {
    case Collective::reduce_scatter:
    case Collective::scatter:
      return in_place ? BlockContent::all_blocks : BlockContent::own_block;
    case Collective::all_gather:
    case Collective::all_to_all:
    case Collective::gather:
      return BlockContent::all_blocks;
    default:
      return BlockContent::nothing_in_blocks;
  }
}

void SegmentList::bind(const CallBuffer& buffer, std::size_t item) {
  buffer_ = &buffer;
  item_ = item;
  base_ = buffer.segments.empty() ? nullptr : buffer.segments[0].base;
  if (buffer.segments.size() < 2) return;
  std::size_t end = 0;
  for (const BufferSegment& s : buffer.segments) ends_.push_back(end += s.count);
}

SegmentList::SegmentPosition SegmentList::find(std::size_t element) const {
  const auto i = std::upper_bound(ends_.begin(), ends_.end(), element) - ends_.begin();
  const std::size_t begin = ends_[i] - buffer_->segments[i].count;
  return {buffer_->segments[i].base + (element - begin) * item_, ends_[i] - element};
}

CallBuffers::CallBuffers(const CollectiveRequest& request, Rank rank, int world)
    : request_(request),
      rank_(rank),
      world_(world),
      item_(item_bytes(request.dtype)),
      input_(input_of(request.collective, request.in_place)),
      output_(output_of(request.collective, request.in_place)) {
  check();
  memories_[0].bind(request.input, item_);
  if (!request.in_place) memories_[1].bind(request.output, item_);
  if (request.irregular) return;
  const CallBuffer& buffer = known();
  const BlockContent holds = &buffer == &request.input ? input_ : output_;
  elements_ = holds == BlockContent::own_block ? total(buffer) * world : total(buffer);
}

// Returns the buffer that determines most of the other ranks' block sizes.
const CallBuffer& CallBuffers::known() const {
  const CallBuffer &in = request_.input, &out = request_.output;
  if (request_.in_place || out.blocks.empty()) return in;
  return in.blocks.empty() || input_ == BlockContent::own_block ? out : in;
}

std::size_t CallBuffers::total(const CallBuffer& buffer) const { return sum(buffer.blocks); }

std::size_t CallBuffers::block(const CallBuffer& buffer, BlockContent holds, std::size_t i) const {
  if (holds != BlockContent::own_block) return buffer.blocks.empty() ? 0 : buffer.blocks[i];
  return request_.irregular && static_cast<Rank>(i) != rank_ ? 0 : total(buffer);
}

void CallBuffers::divide(int chunks) {
  const bool blocks = input_ != BlockContent::nothing_in_blocks;
  require(!blocks || chunks == world_ || chunks % world_ == 0, "a plan of ", chunks,
          " chunks cannot be divided into blocks for ", world_, " ranks");
  per_block_ = !blocks ? chunks : chunks == world_ ? 1 : chunks / world_;
  const std::size_t n = blocks ? world_ : 1, align = kLine / item_;
  auto bind = [&](ChunkOffsets& offsets, const CallBuffer& buffer, BlockContent holds) {
    offsets.bind(chunks, n, align, [&](std::size_t i) { return block(buffer, holds, i); });
  };
  if (!request_.irregular) {
    const CallBuffer& buffer = known();
    return bind(offsets_[0], buffer, &buffer == &request_.input ? input_ : output_);
  }
  bind(offsets_[0], request_.input, input_);
  bind(offsets_[1], request_.in_place ? request_.input : request_.output, output_);
}

void CallBuffers::check(const char* what, const CallBuffer& buffer, BlockContent holds) const {
  if (buffer.blocks.empty()) return require(buffer.segments.empty(), what, " has no block sizes");
  std::size_t elements = 0;
  for (const BufferSegment& s : buffer.segments) elements += s.count;
  require(elements == sum(buffer.blocks), what, " has ", elements,
          " elements, but its blocks have ", sum(buffer.blocks));
  const std::size_t n = buffer.blocks.size(), world = world_;
  require(holds == BlockContent::own_block || n == (holds == BlockContent::all_blocks ? world : 1),
          what, " has ", n, " blocks; ", name(request_.collective), " of ", world, " ranks needs ",
          holds == BlockContent::all_blocks ? world : 1);
}

void CallBuffers::check() const {
  const CallBuffer &in = request_.input, &out = request_.output;
  check("the input", in, input_);
  require(!request_.in_place || out.blocks.empty() || total(in) == total(out),
          "in place, the output must have as many elements as the input");
  if (request_.in_place) return;
  check("the output", out, output_);
  if (request_.irregular) return;
  const Collective c = request_.collective;
  const bool alike =
      c == Collective::all_to_all || c == Collective::gather || c == Collective::scatter;
  require(!alike || (is_even(in.blocks) || input_ == BlockContent::own_block), name(c),
          " with input blocks of different sizes must be called as irregular");
  require(!alike || (is_even(out.blocks) || output_ == BlockContent::own_block), name(c),
          " with output blocks of different sizes must be called as irregular");
  if (in.blocks.empty() || out.blocks.empty()) return;
  const CallBuffer& whole = known();
  auto wanted = [&](BlockContent holds) {
    return holds == BlockContent::own_block ? whole.blocks[rank_] : total(whole);
  };
  require(total(in) == wanted(input_), "the input has ", total(in), " elements; it must have ",
          wanted(input_));
  require(total(out) == wanted(output_), "the output has ", total(out), " elements; it must have ",
          wanted(output_));
}

}  // namespace pycollect::ipc
