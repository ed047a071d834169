// See executor.h. First the hosts agree, as in every call of the group, so that whatever is refused
// has touched no stream, and on whether all tensors lie where everybody reaches them. Then each
// runs its script: a wait is enqueued when the host has seen that what it waits for is, a move is a
// launch.
#include "executor.h"

#include "../plan/error.h"
#include "../shm/choice.h"
#include "../shm/places.h"
#include "on_stream.h"

namespace pycollect::slabs {
namespace {

using shm::Occasion;
using shm::Request;
using shm::Script;

// Do tensors that are taken where they are cost less than copies to slots and back? In an
// all_reduce always: two hand-overs either way (all have come, the fold is done), and no launch but
// the fold's. In everything else who lends a tensor waits until the others are done with it, which
// is a hand-over more than slots need; below so many bytes, which a GPU copies in about the time of
// one, copies are taken to be cheaper. Not measured.
constexpr std::size_t kPlacedBytes = 1 << 20;

bool pays(Collective collective, std::size_t bytes) {
  return collective == Collective::all_reduce || bytes >= kPlacedBytes;
}

// Everything that can be refused is, before the others hear of the call.
struct Prepared {
  shm::Sides sides;
  const std::size_t bytes;   // of all blocks; 0 where a rank cannot know it
  const Script& slots;       // through the slots
  const Script* const open;  // in the tensors themselves; null: not for so little

  Prepared(const Dock& dock, const Request& request)
      : sides(request, dock.slab().rank(), dock.slab().world()),
        bytes(sides.elements() * sides.item()),
        slots(script(dock, request, dock.ground())),
        open(pays(request.collective, bytes) ? &script(dock, request, dock.open_ground())
                                             : nullptr) {
    shm::check_measured(request, slots);
    require_type(reduces(request.dtype, request.op), name(request.op), " is not defined for ",
                 name(request.dtype));
    sides.cut(slots.chunks);
  }

 private:
  const Script& script(const Dock& dock, const Request& request, Ground ground) const {
    const Script& found =
        shm::script_for(dock.slab().rank(), dock.slab().world(), request, {bytes, ground});
    shm::region_bytes(dock.slab().slot_bytes(), found);
    return found;
  }
};

Prepared prepare(Dock& dock, const Request& request, const Occasion& occasion) {
  try {
    return Prepared(dock, request);
  } catch (const std::invalid_argument& error) {
    shm::refuse(dock.group(), request.collective, occasion.call, occasion.deadline,
                text(name(request.collective), ": ", error.what()));
    throw;
  }
}

}  // namespace

OnStream::OnStream(Dock& dock, const Request& request, const Occasion& occasion)
    : dock_(dock),
      occasion_(occasion),
      launch_{{}, request.dtype, request.op, shm::fold_options(request, dock.slab().world())} {}

std::byte* OnStream::find(Rank r, shm::Where where) const {
  const shm::Places& places = dock_.group().line(r).places[occasion_.call & 1];
  const Place place = where == shm::Where::input ? places.input : places.output;
  try {
    return dock_.tracts().at(dock_.slab().device(), r, place);
  } catch (const std::runtime_error& error) {
    const std::string why = text("rank ", r, "'s tensor cannot be reached: ", error.what());
    dock_.group().abort(text("it failed in ", occasion_.operation, ": ", why));
    throw CollectiveError(text(occasion_.operation, ": ", why));
  }
}

void OnStream::reach(const shm::Script& open) {
  reached_.assign(2 * static_cast<std::size_t>(dock_.slab().world()), nullptr);
  for (const shm::Move& move : open.moves)
    for (const shm::Operand& o : move.operands) {
      if (o.where == shm::Where::slot || o.rank == rank()) continue;
      std::byte*& at = reached_[index(o.rank, o.where)];
      if (at == nullptr) at = find(o.rank, o.where);
    }
}

void OnStream::settle(uint64_t run, const Occasion& occasion) {
  for (Rank r = 0; r < dock_.slab().world(); ++r)
    if (r != rank()) await(r, shm::at_run(run - 1), occasion);
}

void OnStream::move(const shm::MoveRow& row) {
  const auto first = reinterpret_cast<std::byte**>(row.at);
  const auto dsts = first + row.move.dsts, end = first + row.move.operands.size();
  launch_.rows.push_back({.dsts = {first, dsts},
                          .srcs = {dsts, end},
                          .count = row.count,
                          .finishes = row.move.finishes});
}

void check(const Dock& dock, const Request& request) { Prepared(dock, request); }

void run(Dock& dock, const Request& request, uint64_t call, shm::Deadline deadline) {
  const Occasion occasion{name(request.collective), call, deadline};
  dock.group().require_whole(occasion);
  Prepared p = prepare(dock, request, occasion);
  OnStream medium(dock, request, occasion);
  shm::Pieces pieces(medium, p.sides);
  pieces.use(p.slots, request.irregular, call);
  const auto places = shm::find_places(
      p.open, p.sides,
      [&](const std::byte* at, std::size_t bytes) { return dock.tracts().place_of(at, bytes); });
  shm::Agreed agreed = shm::exchange(dock.group(), request, {pieces.wanted(), places}, occasion);
  if (agreed.placed) {
    p.sides.cut(p.open->chunks);
    pieces.use(*p.open, false, call);
    agreed.pieces = pieces.wanted();
  }
  shm::whole_or_broken(dock.group(), occasion, [&] {
    const uint64_t first = dock.run();
    if (agreed.placed) medium.reach(*p.open);
    // Slots are somebody's until the run before the last is over; tensors are not.
    if (!agreed.placed || p.open->regions > 0) medium.settle(first, occasion);
    if (!agreed.placed) pieces.lead(first);
    medium.advance(shm::at_run(first) + (agreed.placed ? 1 : p.slots.led()));
    pieces.run(first, agreed.pieces, !agreed.placed, occasion);
    dock.take_runs(agreed.pieces);
  });
}

}  // namespace pycollect::slabs
