// See agreement.h.
#include "agreement.h"

#include <algorithm>

namespace pycollect::ipc {

// The counts are stored behind the rank's FingerprintDetails.
ElementCounts counts_of(const Group& group, Rank r, uint64_t call) {
  auto* sent = reinterpret_cast<uint64_t*>(&group.fingerprint_details(r, call) + 1);
  return {sent, sent + group.all_ranks()};
}

namespace {

PublishedCalls published_calls(const Group& group, uint64_t call) {
  return [&group, call](Rank r) -> PublishedCall {
    return {group.entry(r, call).fingerprint, group.fingerprint_details(r, call),
            counts_of(group, r, call)};
  };
}

}  // namespace

void await_previous(Group& group, uint64_t run, const OpContext& context) {
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) group.await(r, at_run(run - 1), context);
}

void await_turn(Group& group, uint64_t run, const OpContext& context) {
  const Fingerprint& last = group.entry(group.rank(), context.call - 1).fingerprint;
  const bool refused = (last.flags & Fingerprint::refused) != 0;
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) group.await(r, at_run(run - 1) + refused, context);
}

void describe(Group& group, const CallFingerprint& mine, const CollectiveRequest* request,
              std::string_view refusal) {
  const uint64_t call = mine.description.call;
  FingerprintDetails& details = group.fingerprint_details(group.rank(), call);
  describe(details, mine);
  if (request == nullptr) describe_refusal(details, refusal);
  if (request != nullptr && request->irregular)
    write_counts(counts_of(group, group.rank(), call), *request, group.all_ranks());
}

// Peers poll the line of the entry, and each store before the last may move it away from them and
// back.
void enter(Group& group, const CallFingerprint& mine, uint64_t progress) {
  CallEntry& entry = group.entry(group.rank(), mine.description.call);
  entry.fingerprint = mine.fingerprint;
  if (mine.has(Fingerprint::zero_copy)) entry.registered = mine.registered;
  group.enter(mine.description.call, progress);
}

void await_entries(Group& group, uint64_t run, const OpContext& context) {
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) {
      // The peer's staging buffer is read next; the peer may have written it already.
      __builtin_prefetch(group.staging_buffer(r, run));
      group.await_entry(r, at_run(run) + 1, context);
    }
}

Agreement compare(const Group& group, const CallFingerprint& mine) {
  Agreement agreed;
  const uint64_t call = mine.description.call;
  bool alike = true;
  for (Rank r = 0; r < group.world(); ++r) {
    const Fingerprint& fingerprint = group.entry(r, call).fingerprint;
    alike &= is_same(fingerprint, mine.fingerprint.fingerprint_hash);
    agreed.pieces = std::max(agreed.pieces, fingerprint.pieces);
    agreed.zero_copy &= (fingerprint.flags & Fingerprint::zero_copy) != 0;
  }
  const auto world_rank = [&](Rank r) { return group.world_rank(r); };
  if (!alike) [[unlikely]]
    throw_mismatch(group.world(), published_calls(group, call), world_rank);
  if (mine.has(Fingerprint::irregular))
    check_counts(mine.collective(), group.world(), published_calls(group, call), world_rank);
  return agreed;
}

bool all_publish_as_many(const Group& group, const CallFingerprint& mine) {
  const uint64_t call = mine.description.call;
  for (Rank r = 0; r < group.world(); ++r) {
    const Fingerprint& fingerprint = group.entry(r, call).fingerprint;
    if ((fingerprint.flags & Fingerprint::refused) != 0) return false;
    if (group.fingerprint_details(r, call).parts != mine.description.parts) return false;
  }
  return true;
}

}  // namespace pycollect::ipc
