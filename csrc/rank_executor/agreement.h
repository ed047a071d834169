// How the ranks of a host publish their fingerprints of a call, and compare them before any output
// is written.
#pragma once
#include <limits>

#include "../group/group.h"
#include "../plan/error.h"
#include "fingerprint.h"

namespace pycollect::ipc {

// All ranks must cut the data into the same pieces, each as much of every chunk as one run moves.
struct Pieces {
  uint32_t count = 1;
  std::size_t elements = std::numeric_limits<std::size_t>::max();  // most of a chunk in a piece
};

struct Agreement {
  Pieces pieces;   // the most that a rank needs, each no larger than a region on any host
  bool zero_copy;  // all ranks have published registered offsets
};

// Returns the counts that a rank of this host has published for an irregular call.
ElementCounts counts_of(const Group& group, Rank r, uint64_t call);

// Waits until every rank has finished the run `run` - 2, whose staging buffers the run `run`
// overwrites. For the first run of a call, whose entry also overwrites this rank's entry of the
// call before the last. If this rank refused the last call, it has not waited for the peers'
// entries, and waits for them here: a peer that has not entered may still read the old entry.
inline void await_turn(Group& group, uint64_t run, const OpContext& context) {
  const Fingerprint& last = group.own_entry(context.call - 1).fingerprint;
  const bool refused = (last.flags & Fingerprint::refused) != 0;
  group.await_peers(at_run(run - 1) + refused, context);
}

// Enters the call with this rank's fingerprint, its description, the counts of `request`, if given
// and irregular, and the progress counter, which is beyond `at_run` of the call's first run. Peers
// poll the line of the entry, and each store before the last may move it away from them and back.
inline void enter(Group& group, const CallFingerprint& mine, uint64_t progress,
                  const CollectiveRequest* request = nullptr) {
  const uint64_t call = mine.description.call;
  describe(group.fingerprint_details(group.rank(), call), mine);
  if (request != nullptr && request->irregular)
    write_counts(counts_of(group, group.rank(), call), *request, group.world());
  CallEntry& entry = group.own_entry(call);
  entry.fingerprint = mine.fingerprint;
  if (mine.has(Fingerprint::zero_copy)) entry.registered = mine.registered;
  group.enter(call, progress);
}

// Waits until every rank of this host has entered the call, whose first run is `run`. Then throws
// the same std::invalid_argument on every rank if the fingerprints differ. `staged`: the run's data
// in rank 0's staging buffer; null: there is none.
Agreement await_entries(Group& group, const CallFingerprint& mine, uint64_t run,
                        const std::byte* staged, const OpContext& context);
// Returns true if every rank of this host has published as many requests as this one and none has
// refused. Every rank must have entered the call.
bool all_publish_as_many(const Group& group, const CallFingerprint& mine);

// Runs `f`, and aborts the group if `f` fails: peers would wait for a rank that cannot continue.
template <class F>
auto abort_on_error(Group& group, const OpContext& context, F&& f) {
  try {
    return f();
  } catch (const CollectiveError&) {
    throw;
  } catch (const std::exception& error) {
    group.abort(text("it failed in ", context.operation, ": ", error.what()));
    throw;
  }
}

}  // namespace pycollect::ipc
