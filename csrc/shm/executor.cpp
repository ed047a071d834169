// See executor.h. All ranks agree on a call before any output is written. Nothing on the way of a
// small call allocates.
#include "executor.h"

#include "../plan/error.h"
#include "agreement.h"
#include "choice.h"
#include "chunk_loop.h"

namespace pycollect::shm {
namespace {

// Everything that can be refused is, before the others hear of the call.
struct Prepared {
  Sides sides;
  const std::size_t bytes;         // of all blocks; 0 where a rank cannot know it
  const Script& in_buffers;        // what others touch goes through buffers
  const Script* const in_tensors;  // in the tensors themselves; null: not for so little

  Prepared(const Transport& transport, const Request& request)
      : sides(request, transport.rank(), transport.world()),
        bytes(sides.elements() * sides.item()),
        in_buffers(script(transport, request, false)),
        in_tensors(transport.may_use_tensors(request.collective, bytes)
                       ? &script(transport, request, true)
                       : nullptr) {
    require_type(reduces(request.dtype, request.op), name(request.op), " is not defined for ",
                 name(request.dtype));
    check_measured(request, in_buffers);
  }

  // Of the sides that others are to touch, if each lies whole where others reach it.
  std::optional<Places> find_places(const Transport& transport) const {
    if (in_tensors == nullptr) return {};
    Places places;
    const auto find = [&](Where where, bool lent, uint64_t& at) {
      if (!lent) return true;
      const Memories& m = sides.memory(where);
      if (!m.whole() || m.base() == nullptr) return false;
      const std::optional<uint64_t> found = transport.place_of(m.base(), sides.bytes(where));
      at = found.value_or(0);
      return found.has_value();
    };
    if (!find(Where::input, in_tensors->lends_input, places.input) ||
        !find(Where::output, in_tensors->lends_output, places.output))
      return {};
    return places;
  }

 private:
  const Script& script(const Transport& transport, const Request& request, bool tensors) const {
    const Script& found = script_for(transport.rank(), transport.world(), request,
                                     {bytes, transport.ground(tensors)});
    region_bytes(transport.buffer_bytes(), found);
    return found;
  }
};

void refuse_at(Group& group, Collective collective, const Occasion& occasion,
               std::string_view why) {
  const uint64_t run = run_number(group);
  begin(group, run, occasion);
  state_refusal(group, {collective, occasion.call, {.flags = Post::refused}}, why);
  group.advance(at_run(run + 1));
}

Prepared prepare(Transport& transport, const Request& request, const Occasion& occasion) {
  try {
    transport.begin(request, occasion);
    return Prepared(transport, request);
  } catch (const std::invalid_argument& error) {
    refuse_at(transport.group(), request.collective, occasion,
              text(name(request.collective), ": ", error.what()));
    throw;
  }
}

}  // namespace

void check(const Transport& transport, const Request& request) {
  if (request.tensors != 0) Prepared(transport, request);
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

void run(Transport& transport, const Request& request, uint64_t call, Deadline deadline) {
  const Occasion occasion{name(request.collective), call, deadline};
  Group& group = transport.group();
  group.require_whole(occasion);
  if (request.tensors == 0) {
    exchange(group, statement(request, call), request, occasion);
    return;
  }
  Prepared p = prepare(transport, request, occasion);
  const uint64_t first = transport.next_run();
  p.sides.cut(p.in_buffers.chunks);
  ChunkLoop loop(transport, p.sides);
  loop.use(p.in_buffers, request.irregular);
  Statement mine = statement(request, call);
  mine.post.pieces = loop.pieces();
  mine.offer(p.find_places(transport));
  const Agreed agreed = transport.agree(mine, loop);
  whole_or_broken(group, occasion, [&] {
    uint32_t pieces = agreed.pieces;
    if (agreed.placed) {
      transport.reach_tensors(*p.in_tensors, p.bytes);
      p.sides.cut(p.in_tensors->chunks);
      loop.use(*p.in_tensors, false);
      pieces = loop.pieces();
    }
    loop.run(first, pieces);
  });
}

void refuse(Group& group, Collective collective, uint64_t call, Deadline deadline,
            std::string_view why) {
  const Occasion occasion{name(collective), call, deadline};
  group.require_whole(occasion);
  refuse_at(group, collective, occasion, why);
}

}  // namespace pycollect::shm
