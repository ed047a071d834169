// See gpu_transport.h. First the hosts agree, as in every call of the group, so that a call which
// is refused has touched no stream, and on whether all tensors lie where everybody reaches them. A
// wait is enqueued when the host has seen that what it waits for is.
#include "gpu_transport.h"

#include "../plan/error.h"
#include "../shm/choice.h"
#include "../shm/chunk_loop.h"

namespace pycollect::slabs {
namespace {

// Do tensors that are taken where they are cost less than copies to buffers and back? In an
// all_reduce always: two hand-overs either way (all have come, the fold is done), and no launch but
// the fold's. In everything else who lends a tensor waits until the others are done with it, which
// is a hand-over more than buffers need; below so many bytes, which a GPU copies in about the time
// of one, copies are taken to be cheaper. Not measured.
constexpr std::size_t kPlacedBytes = 1 << 20;

}  // namespace

bool GpuTransport::may_use_tensors(Collective collective, std::size_t bytes) const {
  return collective == Collective::all_reduce || bytes >= kPlacedBytes;
}

void GpuTransport::begin(const shm::Request& request, const shm::Occasion& occasion) {
  request_ = &request;
  occasion_ = &occasion;
  launch_ = {{}, request.dtype, request.op, shm::fold_options(request, world())};
}

shm::Agreed GpuTransport::agree(const shm::Statement& mine, shm::ChunkLoop& loop) {
  const shm::Agreed agreed = shm::exchange(group(), mine, *request_, *occasion_);
  if (agreed.placed) return agreed;
  shm::whole_or_broken(group(), *occasion_, [&] {
    settle(next_run());
    signal(shm::at_run(next_run()) + loop.enter(next_run(), true));
  });
  return agreed;
}

std::byte* GpuTransport::find(Rank r, shm::Where where) const {
  const shm::Places& places = group().line(r).places[occasion_->call & 1];
  const Place place = where == shm::Where::input ? places.input : places.output;
  try {
    return dock_->tracts().at(dock_->slab().device(), r, place);
  } catch (const std::runtime_error& error) {
    if ((group().dead() >> r & 1) != 0)  // which says more than that it does not answer
      group().await([] { return false; }, [r] { return std::vector<Rank>{r}; }, *occasion_);
    const std::string why = text("rank ", r, "'s tensor cannot be reached: ", error.what());
    group().abort(text("it failed in ", occasion_->operation, ": ", why));
    throw CollectiveError(text(occasion_->operation, ": ", why));
  }
}

// All of them are opened before anything is enqueued.
void GpuTransport::reach_tensors(const shm::Script& script, std::size_t) {
  reached_.assign(2 * static_cast<std::size_t>(world()), nullptr);
  for (const shm::Move& move : script.moves)
    for (const shm::Operand& o : move.operands) {
      if (o.where == shm::Where::slot || o.rank == rank()) continue;
      std::byte*& at = reached_[index(o.rank, o.where)];
      if (at == nullptr) at = find(o.rank, o.where);
    }
}

void GpuTransport::settle(uint64_t run) {
  for (Rank r = 0; r < world(); ++r)
    if (r != rank()) wait(r, shm::at_run(run - 1));
}

// One launch, however many tensors the elements are spread over.
void GpuTransport::launch(const shm::Rows& rows) {
  const shm::Move& move = rows.move();
  launch_.rows.clear();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const shm::Rows::Row row = rows[i];
    const auto first = reinterpret_cast<std::byte* const*>(row.at);
    const auto dsts = first + move.dsts, end = first + move.operands.size();
    launch_.rows.push_back({.dsts = {first, dsts},
                            .srcs = {dsts, end},
                            .count = row.count,
                            .finishes = move.finishes});
  }
  // What goes to buffers does no harm after an abort; who owns a tensor has been told of it, and
  // may have given its memory away.
  launch_.guard = move.in_slots == move.dsts ? nullptr : dock_->guard();
  dock_->gpu().on(dock_->stream().device,
                  [&](cuda::Api& api) { api.launch(dock_->stream(), launch_); });
}

}  // namespace pycollect::slabs
