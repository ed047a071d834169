// See agreement.h.
#include "agreement.h"

#include <algorithm>

#include "transport.h"

namespace pycollect::ipc {

// The counts are stored behind the rank's FingerprintDetails.
ElementCounts counts_of(const Group& group, Rank r, uint64_t call) {
  auto* sent = reinterpret_cast<uint64_t*>(&group.fingerprint_details(r, call) + 1);
  return {sent, sent + group.all_ranks()};
}

namespace {

PublishedCalls published_calls(Group& group, uint64_t call) {
  return [&group, call](Rank r) -> PublishedCall {
    return {group.rank_state(r).fingerprints[call & 1], group.fingerprint_details(r, call),
            counts_of(group, r, call)};
  };
}

}  // namespace

void wait_for_previous(Group& group, uint64_t run, const OpContext& context) {
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) group.await(r, at_run(run - 1), context);
}

void begin(Group& group, uint64_t run, const OpContext& context) {
  const Fingerprint& last = group.rank_state(group.rank()).fingerprints[(context.call - 1) & 1];
  const bool refused = (last.flags & Fingerprint::refused) != 0;
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) group.await(r, at_run(run - 1) + refused, context);
}

void publish(Group& group, const CallFingerprint& s, const CollectiveRequest* request) {
  describe(group.fingerprint_details(group.rank(), s.call), s, request);
  if (request != nullptr && request->irregular)
    write_counts(counts_of(group, group.rank(), s.call), *request, group.all_ranks());
  RankState& state = group.rank_state(group.rank());
  state.fingerprints[s.call & 1] = s.fingerprint;
  if ((s.fingerprint.flags & Fingerprint::zero_copy) != 0)
    state.registered[s.call & 1] = s.registered;
}

void publish_refusal(Group& group, const CallFingerprint& s, std::string_view why) {
  describe_refusal(group.fingerprint_details(group.rank(), s.call), s, why);
  group.rank_state(group.rank()).fingerprints[s.call & 1] = s.fingerprint;
}

Agreement agree(Group& group, const CallFingerprint& mine, uint64_t run, const OpContext& context) {
  const uint64_t entered = at_run(run) + 1;
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) {
      // The peer's staging buffer is read next; the peer may have written it already.
      __builtin_prefetch(group.staging_buffer(r, run));
      group.await(r, entered, context);
    }
  Agreement agreed;
  bool alike = true;
  for (Rank r = 0; r < group.world(); ++r) {
    const Fingerprint& fingerprint = group.rank_state(r).fingerprints[mine.call & 1];
    alike &= is_same(fingerprint, mine.fingerprint.fingerprint_hash);
    agreed.pieces = std::max(agreed.pieces, fingerprint.pieces);
    agreed.zero_copy &= (fingerprint.flags & Fingerprint::zero_copy) != 0;
  }
  const auto world_rank = [&](Rank r) { return group.world_rank(r); };
  if (!alike) [[unlikely]]
    throw_mismatch(group.world(), published_calls(group, mine.call), world_rank);
  if ((mine.fingerprint.flags & Fingerprint::irregular) != 0)
    check_counts(mine.collective, group.world(), published_calls(group, mine.call), world_rank);
  return agreed;
}

Agreement agree(Transport& transport, const CallFingerprint& mine, uint64_t run,
                const OpContext& context, ChunkLoop* loop) {
  Agreement of_host;
  try {
    of_host = agree(transport.group(), mine, run, context);
  } catch (const std::invalid_argument& error) {
    transport.reject(mine, context, error.what());
    throw;
  }
  return transport.confirm(mine, of_host, context, loop);
}

Agreement publish_and_agree(Transport& transport, const CallFingerprint& mine,
                            const CollectiveRequest& request, const OpContext& context) {
  Group& group = transport.group();
  group.update_call();
  group.require_run(context);
  const uint64_t run = group.run_number();
  begin(group, run, context);
  publish(group, mine, &request);
  group.advance(at_run(run + 1));
  const Agreement agreed = agree(transport, mine, run, context);
  group.update_call();
  return agreed;
}

bool all_publish_as_many(const Group& group, const CallFingerprint& mine) {
  for (Rank r = 0; r < group.world(); ++r) {
    const Fingerprint& fingerprint = group.rank_state(r).fingerprints[mine.call & 1];
    if ((fingerprint.flags & Fingerprint::refused) != 0) return false;
    if (group.fingerprint_details(r, mine.call).parts != mine.parts) return false;
  }
  return true;
}

}  // namespace pycollect::ipc
