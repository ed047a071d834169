// One rank's side of a collective between processes. What the plan moves between ranks goes through
// their transport's buffers, a piece at a time, in two buffers by turns; tensors that lie where all
// ranks reach them are read and written there. No torch.
#pragma once
#include <string_view>
#include <vector>

#include "../plan/error.h"
#include "../plan/offsets.h"
#include "../plan/registry.h"
#include "group.h"

namespace pycollect::shm {

class Transport;

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
  bool on_gpus = false;  // the transport is that of GPUs: must agree
};

// Runs it in the calling thread, with the others' help: to its end, or until all of it is enqueued
// where the transport's signals are those of streams. One at a time per group, in the same order on
// all ranks; `call` counts them, refused ones too, one by one. Throws std::invalid_argument, on all
// ranks alike and before anything has moved but in buffers, when the ranks' requests do not fit
// each other; PeerLost and Timeout as Group says.
void run(Transport& transport, const Request& request, uint64_t call, Deadline deadline);

// Throws std::invalid_argument if `run` would before the others hear of the request.
void check(const Transport& transport, const Request& request);

// Before several requests that are one to their caller: finds out whether all of them are alike on
// all ranks, so that either every one runs or none does. Takes numbers of the group's calls from
// `calls`, on all ranks as many. Throws as `run` does, about the first request that differs.
void agree_on_all(Group& group, const std::vector<const Request*>& requests, uint64_t& calls,
                  Deadline deadline);

// Instead of running what this rank was asked for, tells the others that it will not: they throw
// with `why`, which begins with what was refused. Returns without waiting for them (but for those
// who have not begun the call before).
void refuse(Group& group, Collective collective, uint64_t call, Deadline deadline,
            std::string_view why);

}  // namespace pycollect::shm
