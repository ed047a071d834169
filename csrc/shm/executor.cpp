// See executor.h. A call is an exchange of posts, with the first piece's copies into the own slot
// in front of it where the tensors are not in shared memory, and then the rank's script for each
// piece. Nothing on the way of a small call allocates.
#include "executor.h"

#include "../plan/error.h"
#include "agreement.h"
#include "choice.h"
#include "in_segment.h"
#include "places.h"

namespace pycollect::shm {
namespace {

// Below this much the tensors' place is not looked at: copying so little is cheaper than waiting
// until the others are done with one's own memory. For each rank.
constexpr std::size_t kPlacedBytes = 512;
// An output this large is not in the caches when it has been written, and stores that pass them by
// are up to twice as fast.
constexpr std::size_t kStreamedBytes = 16 << 20;

uint64_t run_number(const Group& group) {
  const Line& line = group.line(group.rank());
  const uint64_t done = line.done.load(std::memory_order_relaxed);
  const uint64_t ended = line.ended.load(std::memory_order_relaxed);
  return (reached(ended, done) ? ended : done) >> kTaskBits;
}

// The others have read what this rank is going to write; getting it back takes as long as
// everything that comes before the writing.
void fetch_own(const Group& group) {
  __builtin_prefetch(&group.line(group.rank()), 1);
  __builtin_prefetch(group.slot(group.rank(), run_number(group)), 1);
}

// Everything that can be refused is, before the others hear of the call.
struct Prepared {
  Sides sides;
  const std::size_t bytes;   // of all blocks; 0 where a rank cannot know it
  const Script& slots;       // through the slots
  const Script* const open;  // in the tensors themselves; null: not for so little
  const cpu::RowRunner row;
  const bool streamed;

  Prepared(const Group& group, const Request& request)
      : sides(request, group.rank(), group.world()),
        bytes(sides.elements() * sides.item()),
        slots(script_for(group.rank(), group.world(), request, {bytes, Ground::slots})),
        open(bytes < kPlacedBytes * group.world() || group.layout().sizes.arena_bytes == 0
                 ? nullptr
                 : &script_for(group.rank(), group.world(), request, {bytes, Ground::arenas})),
        row(request.dtype, request.op, fold_options(request, group.world())),
        streamed(request.options.non_temporal && !request.in_place &&
                 sides.total(request.output) * sides.item() >= kStreamedBytes) {
    region_bytes(group.layout().sizes.slot_bytes, slots);
    if (open != nullptr) region_bytes(group.layout().sizes.slot_bytes, *open);
    check_measured(request, slots);
  }
};

std::optional<Places> find_places(const Group& group, const Prepared& p) {
  return find_places(p.open, p.sides, [&](const std::byte* at, std::size_t) {
    const auto offset = static_cast<uint64_t>(at - group.arena(group.rank()));
    const bool inside = offset < group.layout().sizes.arena_bytes;  // or before it: a large number
    return inside ? std::optional(offset) : std::nullopt;
  });
}

Statement statement(const Request& request, uint64_t call) {
  Statement mine{request.collective, call, {.signature = signature(request, call)}};
  if (request.irregular) mine.post.flags |= Post::irregular;
  return mine;
}

Agreed agree_or_skip(Group& group, const Statement& mine, uint64_t run, const Occasion& occasion) {
  try {
    return agree(group, mine, run, occasion);
  } catch (const std::invalid_argument&) {
    group.advance(at_run(run + 1));
    throw;
  }
}

// Others' tensors are written at the places that they name: no rank names one outside its arena,
// but a word that was overwritten does.
void check_places(Group& group, const Request& request, std::size_t bytes,
                  const Occasion& occasion) {
  const std::size_t arena = group.layout().sizes.arena_bytes;
  const auto world = static_cast<std::size_t>(group.world());
  const Sizes& out = request.output.blocks;
  const Sizes& blocks = out.size() == world ? out : request.input.blocks;
  const auto inside = [&](Rank r, uint64_t place, Holds holds) {
    const std::size_t block = blocks.size() == world ? blocks[r] * item_bytes(request.dtype) : 0;
    const std::size_t lent = holds == Holds::own_block ? block : bytes;
    return place == 0 || (place <= arena && lent <= arena - place);  // 0: nothing is lent
  };
  for (Rank r = 0; r < group.world(); ++r) {
    const Places& places = group.line(r).places[occasion.call & 1];
    if (inside(r, places.input, input_of(request.collective, request.in_place)) &&
        inside(r, places.output, output_of(request.collective, request.in_place)))
      continue;
    group.abort(text("rank ", r, " lends memory that it does not have"));
    group.require_whole(occasion);
  }
}

void run_collective(Group& group, const Request& request, Prepared& p, const Occasion& occasion,
                    const cpu::ParallelFor& parallel_for) {
  const uint64_t first = run_number(group);
  Statement mine = statement(request, occasion.call);
  const auto places = find_places(group, p);
  const bool placed = places.has_value();
  p.sides.cut(p.slots.chunks);
  InSegment medium(group, occasion, {p.row, parallel_for, p.streamed});
  Pieces pieces(medium, p.sides);
  pieces.use(p.slots, request.irregular, occasion.call);
  mine.post.pieces = pieces.wanted();
  mine.offer(places);

  begin(group, first, occasion);
  if (!placed) whole_or_broken(group, occasion, [&] { pieces.lead(first); });
  // As late as can be: the others look at this line all the while, and each store takes it away
  // from them and back.
  state(group, mine, &request);
  group.advance(at_run(first) + (placed ? 1 : p.slots.led()));
  Agreed agreed = agree_or_skip(group, mine, first, occasion);
  whole_or_broken(group, occasion, [&] {
    if (agreed.placed) {
      check_places(group, request, p.bytes, occasion);
      p.sides.cut(p.open->chunks);
      pieces.use(*p.open, false, occasion.call);
      agreed.pieces = pieces.wanted();
    }
    pieces.run(first, agreed.pieces, !placed, occasion);
  });
}

void refuse_at(Group& group, Collective collective, const Occasion& occasion,
               std::string_view why) {
  const uint64_t run = run_number(group);
  begin(group, run, occasion);
  state_refusal(group, {collective, occasion.call, {.flags = Post::refused}}, why);
  group.advance(at_run(run + 1));
}

Prepared prepare(Group& group, const Request& request, const Occasion& occasion) {
  try {
    return Prepared(group, request);
  } catch (const std::invalid_argument& error) {
    refuse_at(group, request.collective, occasion,
              text(name(request.collective), ": ", error.what()));
    throw;
  }
}

// An exchange of posts, and nothing behind it.
Agreed exchange(Group& group, const Statement& mine, const Request& request,
                const Occasion& occasion) {
  group.require_whole(occasion);
  const uint64_t run = run_number(group);
  begin(group, run, occasion);
  state(group, mine, &request);
  group.advance(at_run(run + 1));
  return agree(group, mine, run, occasion);
}

}  // namespace

Agreed exchange(Group& group, const Request& request, const Offer& offer,
                const Occasion& occasion) {
  Statement mine = statement(request, occasion.call);
  mine.post.pieces = offer.pieces;
  mine.offer(offer.places);
  return exchange(group, mine, request, occasion);
}

void check(const Group& group, const Request& request) {
  if (request.tensors != 0) Prepared(group, request);
}

// A fingerprint of all of them tells whether they are alike; only if not, or where the counts that
// a fingerprint cannot hold must be compared, does each have an exchange of its own.
void agree_on_all(Group& group, const std::vector<const Request*>& requests, uint64_t& calls,
                  Deadline deadline) {
  const Request& first = *requests.front();
  const auto parts = static_cast<uint32_t>(requests.size());
  const auto occasion = [&](const Request& r) {
    return Occasion{name(r.collective), calls++, deadline};
  };
  const auto exchange_part = [&](uint32_t i) {
    const Occasion own = occasion(*requests[i]);
    Statement mine = statement(*requests[i], own.call);
    mine.part = i;
    mine.parts = parts;
    exchange(group, mine, *requests[i], own);
  };
  const Occasion together = occasion(first);
  Statement all{first.collective, together.call, {.signature = signature(requests, together.call)}};
  all.parts = parts;
  try {
    exchange(group, all, first, together);
  } catch (const std::invalid_argument&) {
    if (!all_state_as_many(group, all)) throw;
    for (uint32_t i = 0; i < parts; ++i) exchange_part(i);  // one of these throws
    throw;
  }
  for (uint32_t i = 0; i < parts; ++i)
    if (requests[i]->irregular) exchange_part(i);
}

void run(Group& group, const Request& request, uint64_t call, Deadline deadline,
         const cpu::ParallelFor& parallel_for) {
  const Occasion occasion{name(request.collective), call, deadline};
  group.require_whole(occasion);
  fetch_own(group);
  if (request.tensors == 0) {
    exchange(group, request, {}, occasion);
    return;
  }
  Prepared prepared = prepare(group, request, occasion);
  run_collective(group, request, prepared, occasion, parallel_for);
}

void refuse(Group& group, Collective collective, uint64_t call, Deadline deadline,
            std::string_view why) {
  const Occasion occasion{name(collective), call, deadline};
  group.require_whole(occasion);
  refuse_at(group, collective, occasion, why);
}

}  // namespace pycollect::shm
