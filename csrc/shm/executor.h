// One rank's side of a collective between processes. What the plan moves between ranks goes through
// their slots in the shared memory, a piece at a time, in two slots by turns; tensors that lie in
// the group's arenas are read and written where they are. No torch.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "../cpu/executor.h"
#include "../plan/error.h"
#include "../plan/offsets.h"
#include "../plan/registry.h"
#include "group.h"

namespace pycollect::shm {

struct Span {
  std::byte* base;
  std::size_t count;  // elements
};

// One buffer of this rank: its elements are those of the spans, one after the other, cut into
// blocks for the plan's chunks: one for each rank where the collective deals in them and the side
// holds all of them (all_gather's output), or else one (its input; both sides of all_reduce).
struct Side {
  std::vector<Span> spans = {};
  Sizes blocks = {};
  // A fingerprint of where tensors end within the blocks; 0: each block is one tensor, or none.
  uint64_t cuts = 0;
};

struct Request {
  Collective collective;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  Rank root = 0;
  std::string_view algorithm = {};  // empty: the selector's
  FoldOptions options = {};
  // The output is the input, and `output` stays empty. The same on all ranks; not needed where a
  // rank's own block lies within the other side.
  bool in_place = false;
  Side input = {}, output = {};  // a side that the rank has no part in stays empty
  // May blocks differ from rank to rank in a way that only the two ends of a transfer know
  // (all_to_all with split sizes, gather and scatter of unlike parts)? The same on all ranks.
  bool irregular = false;
  // How many the caller gave: must agree. None: nothing moves, the ranks only agree on the call.
  uint64_t tensors = 1;
  bool on_gpus = false;  // the sides are in GPUs' memory, and this executor does not touch them
};

// Runs it to its end in the calling thread, with the others' help. One at a time per group, in the
// same order on all ranks; `call` counts them, refused ones too, one by one. Throws
// std::invalid_argument, on all ranks alike and before any output is written, when the ranks'
// requests do not fit each other; PeerLost and Timeout as Group says.
void run(Group& group, const Request& request, uint64_t call, Deadline deadline,
         const cpu::ParallelFor& parallel_for);

// What a rank says of a call besides what it was asked for, and what came of all ranks' offers.
struct Offer {
  uint32_t pieces = 1;                // that it takes the call to be
  std::optional<Places> places = {};  // of its tensors, if others can reach them all there
};
struct Agreed {
  uint32_t pieces = 0;  // the most that any rank says
  bool placed = true;   // all ranks have offered places
};

// Only finds out whether all ranks were asked for the same, as one call of the group. Throws as
// `run` does.
Agreed exchange(Group& group, const Request& request, const Offer& offer, const Occasion& occasion);

// Throws std::invalid_argument if `run` would before the others hear of the request.
void check(const Group& group, const Request& request);

// Before several requests that are one to their caller: finds out whether all of them are alike on
// all ranks, so that either every one runs or none does. Takes numbers of the group's calls from
// `calls`, on all ranks as many. Throws as `run` does, about the first request that differs.
void agree_on_all(Group& group, const std::vector<const Request*>& requests, uint64_t& calls,
                  Deadline deadline);

// Whoever cannot go on in the middle of a call takes the others with it: they would wait for it.
template <class F>
void whole_or_broken(Group& group, const Occasion& occasion, F&& f) {
  try {
    f();
  } catch (const CollectiveError&) {
    throw;
  } catch (const std::exception& error) {
    group.abort(text("it failed in ", occasion.operation, ": ", error.what()));
    throw;
  }
}

// Instead of running what this rank was asked for, tells the others that it will not: they throw
// with `why`, which begins with what was refused. Returns without waiting for them (but for those
// who have not begun the call before).
void refuse(Group& group, Collective collective, uint64_t call, Deadline deadline,
            std::string_view why);

}  // namespace pycollect::shm
