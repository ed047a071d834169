// Checks that all ranks make the same collective call, before any output is written. Each rank
// publishes a fingerprint, and a description for error messages, with its progress counter.
#pragma once
#include <cstddef>
#include <limits>
#include <string_view>

#include "../plan/error.h"
#include "call_buffers.h"
#include "executor.h"
#include "fingerprint.h"

namespace pycollect::ipc {

class ChunkLoop;

struct Agreement {
  uint32_t pieces = 0;    // maximum over all ranks
  bool zero_copy = true;  // true if all ranks have published registered offsets
  // Most elements of a chunk in a piece: as many as a region holds on every host.
  std::size_t piece = std::numeric_limits<std::size_t>::max();
};

// Returns the counts that a rank of this host has published for an irregular call.
ElementCounts counts_of(const Group& group, Rank r, uint64_t call);

// Both wait until every rank has finished the run `run` - 2, whose staging buffers the run `run`
// overwrites. `begin` is for the first run of a call, which also overwrites this rank's fingerprint
// of the call before the last. If this rank refused the last call, it has not waited for the peers'
// fingerprints, and `begin` waits for them: a peer without one may still read the old fingerprint.
void begin(Group& group, uint64_t run, const OpContext& context);
void wait_for_previous(Group& group, uint64_t run, const OpContext& context);
// Both write this rank's fingerprint; `publish_refusal` marks it as refused, for the reason `why`.
// Peers may read it once this rank's progress counter is beyond `at_run` of the call's first run.
void publish(Group& group, const CallFingerprint& mine, const CollectiveRequest* request);
void publish_refusal(Group& group, const CallFingerprint& mine, std::string_view why);

// Waits for the fingerprint of every rank of this host. Throws the same std::invalid_argument on
// every rank if the fingerprints differ.
Agreement agree(Group& group, const CallFingerprint& mine, uint64_t run, const OpContext& context);
// The same for the ranks of all hosts; `loop`: see Transport::confirm.
Agreement agree(Transport& transport, const CallFingerprint& mine, uint64_t run,
                const OpContext& context, ChunkLoop* loop = nullptr);
// Publishes the fingerprint and waits for all others, in a run of its own that moves no data.
Agreement publish_and_agree(Transport& transport, const CallFingerprint& mine,
                            const CollectiveRequest& request, const OpContext& context);
// Returns true if every rank of this host has published as many requests as this one and none has
// refused. Every rank's fingerprint must have arrived.
bool all_publish_as_many(const Group& group, const CallFingerprint& mine);

// Runs `f`, and aborts the group if `f` fails: peers would wait for a rank that cannot continue.
template <class F>
void abort_on_error(Group& group, const OpContext& context, F&& f) {
  try {
    f();
  } catch (const CollectiveError&) {
    throw;
  } catch (const std::exception& error) {
    group.abort(text("it failed in ", context.operation, ": ", error.what()));
    throw;
  }
}

}  // namespace pycollect::ipc
