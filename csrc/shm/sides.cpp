// Checks that a request's buffers are what its collective needs, in words for the caller.
#include "sides.h"

#include <algorithm>
#include <numeric>

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

// Pieces begin at whole cache lines of a buffer, so that vectors stay whole.
constexpr std::size_t kLine = 64;

std::size_t sum(const Sizes& blocks) {
  return std::accumulate(blocks.begin(), blocks.end(), std::size_t{0});
}

bool is_even(const Sizes& blocks) {
  return std::adjacent_find(blocks.begin(), blocks.end(), std::not_equal_to<>()) == blocks.end();
}

}  // namespace

Holds input_of(Collective c, bool in_place) {
  switch (c) {
    case Collective::all_gather:
    case Collective::gather:
      return in_place ? Holds::all_blocks : Holds::own_block;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
    case Collective::scatter:
      return Holds::all_blocks;
    default:
      return Holds::nothing_in_blocks;
  }
}

Holds output_of(Collective c, bool in_place) {
  switch (c) {
    case Collective::reduce_scatter:
    case Collective::scatter:
      return in_place ? Holds::all_blocks : Holds::own_block;
    case Collective::all_gather:
    case Collective::all_to_all:
    case Collective::gather:
      return Holds::all_blocks;
    default:
      return Holds::nothing_in_blocks;
  }
}

void Memories::bind(const Side& side, std::size_t item) {
  side_ = &side;
  item_ = item;
  base_ = side.spans.empty() ? nullptr : side.spans[0].base;
  if (side.spans.size() < 2) return;
  std::size_t end = 0;
  for (const Span& s : side.spans) ends_.push_back(end += s.count);
}

Memories::Piece Memories::find(std::size_t element) const {
  const auto span = std::upper_bound(ends_.begin(), ends_.end(), element) - ends_.begin();
  const std::size_t begin = ends_[span] - side_->spans[span].count;
  return {side_->spans[span].base + (element - begin) * item_, ends_[span] - element};
}

Sides::Sides(const Request& request, Rank rank, int world)
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
  const Side& side = known();
  const Holds holds = &side == &request.input ? input_ : output_;
  elements_ = holds == Holds::own_block ? total(side) * world : total(side);
}

// The side that says most of how the others' blocks are cut.
const Side& Sides::known() const {
  const Side &in = request_.input, &out = request_.output;
  if (request_.in_place || out.blocks.empty()) return in;
  return in.blocks.empty() || input_ == Holds::own_block ? out : in;
}

std::size_t Sides::total(const Side& side) const { return sum(side.blocks); }

std::size_t Sides::block(const Side& side, Holds holds, std::size_t i) const {
  if (holds != Holds::own_block) return side.blocks.empty() ? 0 : side.blocks[i];
  return request_.irregular && static_cast<Rank>(i) != rank_ ? 0 : total(side);
}

void Sides::cut(int chunks) {
  const bool blocks = input_ != Holds::nothing_in_blocks;
  require(!blocks || chunks == world_ || chunks % world_ == 0, "a plan of ", chunks,
          " chunks has no blocks for ", world_, " ranks");
  per_block_ = !blocks ? chunks : chunks == world_ ? 1 : chunks / world_;
  const std::size_t n = blocks ? world_ : 1, align = kLine / item_;
  auto bind = [&](ChunkOffsets& cut, const Side& side, Holds holds) {
    cut.bind(chunks, n, align, [&](std::size_t i) { return block(side, holds, i); });
  };
  if (!request_.irregular) {
    const Side& side = known();
    return bind(cuts_[0], side, &side == &request_.input ? input_ : output_);
  }
  bind(cuts_[0], request_.input, input_);
  bind(cuts_[1], request_.in_place ? request_.input : request_.output, output_);
}

void Sides::check(const char* what, const Side& side, Holds holds) const {
  if (side.blocks.empty()) return require(side.spans.empty(), what, " is not cut into blocks");
  std::size_t elements = 0;
  for (const Span& s : side.spans) elements += s.count;
  require(elements == sum(side.blocks), what, " has ", elements, " elements, and its blocks have ",
          sum(side.blocks));
  const std::size_t n = side.blocks.size(), world = world_;
  require(holds == Holds::own_block || n == (holds == Holds::all_blocks ? world : 1), what,
          " is cut into ", n, " blocks; ", name(request_.collective), " of ", world, " ranks has ",
          holds == Holds::all_blocks ? world : 1);
}

void Sides::check() const {
  const Side &in = request_.input, &out = request_.output;
  check("the input", in, input_);
  require(!request_.in_place || out.blocks.empty() || total(in) == total(out),
          "in place, the output is the input");
  if (request_.in_place) return;
  check("the output", out, output_);
  if (request_.irregular) return;
  const Collective c = request_.collective;
  const bool alike =
      c == Collective::all_to_all || c == Collective::gather || c == Collective::scatter;
  require(!alike || (is_even(in.blocks) || input_ == Holds::own_block), name(c),
          " of unlike blocks must be called as irregular");
  require(!alike || (is_even(out.blocks) || output_ == Holds::own_block), name(c),
          " of unlike blocks must be called as irregular");
  if (in.blocks.empty() || out.blocks.empty()) return;
  const Side& whole = known();
  auto wanted = [&](Holds holds) {
    return holds == Holds::own_block ? whole.blocks[rank_] : total(whole);
  };
  require(total(in) == wanted(input_), "the input has ", total(in), " elements; it must have ",
          wanted(input_));
  require(total(out) == wanted(output_), "the output has ", total(out), " elements; it must have ",
          wanted(output_));
}

}  // namespace pycollect::shm
