// See executor.h. First the hosts agree, as in every call of the group, so that whatever is refused
// has touched no stream. Then each runs its script: a wait is enqueued when the host has seen that
// what it waits for is, a move is a launch.
#include "executor.h"

#include "../plan/error.h"
#include "../shm/choice.h"
#include "on_stream.h"

namespace pycollect::slabs {
namespace {

using shm::Occasion;
using shm::Request;
using shm::Script;

// Everything that can be refused is, before the others hear of the call.
struct Prepared {
  shm::Sides sides;
  const Script& script;

  Prepared(const Dock& dock, const Request& request)
      : sides(request, dock.slab().rank(), dock.slab().world()),
        script(shm::script_for(dock.slab().rank(), dock.slab().world(), request,
                               {sides.elements() * sides.item(), dock.ground()})) {
    shm::region_bytes(dock.slab().slot_bytes(), script);
    shm::check_measured(request, script);
    require_type(reduces(request.dtype, request.op), name(request.op), " is not defined for ",
                 name(request.dtype));
    sides.cut(script.chunks);
  }
};

Prepared prepare(Dock& dock, const Request& request, const Occasion& occasion) {
  try {
    return Prepared(dock, request);
  } catch (const std::invalid_argument& error) {
    shm::refuse(dock.group(), request.collective, occasion.call, occasion.deadline, error.what());
    throw;
  }
}

}  // namespace

OnStream::OnStream(Dock& dock, const Request& request, const Occasion& occasion)
    : dock_(dock),
      occasion_(occasion),
      launch_{{}, request.dtype, request.op, shm::fold_options(request, dock.slab().world())} {}

std::byte* OnStream::place(Rank, shm::Where, uint64_t) const {
  throw std::logic_error("tensors on GPUs lie in no arena");  // and no script here takes them to
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

void run(Dock& dock, const Request& request, uint64_t call, shm::Deadline deadline) {
  const Occasion occasion{name(request.collective), call, deadline};
  dock.group().require_whole(occasion);
  Prepared p = prepare(dock, request, occasion);
  OnStream medium(dock, request, occasion);
  shm::Pieces pieces(medium, p.sides);
  pieces.use(p.script, request.irregular, call);
  const uint32_t agreed = shm::exchange(dock.group(), request, pieces.wanted(), occasion);
  shm::whole_or_broken(dock.group(), occasion, [&] {
    const uint64_t first = dock.run();
    medium.settle(first, occasion);
    pieces.lead(first);
    medium.advance(shm::at_run(first) + p.script.led());
    pieces.run(first, agreed, true, occasion);
    dock.take_runs(agreed);
  });
}

}  // namespace pycollect::slabs
