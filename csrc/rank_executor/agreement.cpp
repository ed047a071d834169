// See agreement.h.
#include "agreement.h"

#include <algorithm>

namespace pycollect::ipc {

// The counts are stored behind the rank's FingerprintDetails.
ElementCounts counts_of(const Group& group, Rank r, uint64_t call) {
  auto* sent = reinterpret_cast<uint64_t*>(&group.fingerprint_details(r, call) + 1);
  return {sent, sent + group.world()};
}

namespace {

// Throws the same std::invalid_argument on every rank if the calls differ.
[[gnu::noinline]] void check(const Group& group, const CallFingerprint& mine, bool same) {
  const auto published = [&, call = mine.description.call](Rank r) -> PublishedCall {
    return {group.entry(r, call).fingerprint, group.fingerprint_details(r, call),
            counts_of(group, r, call)};
  };
  const auto world_rank = [&](Rank r) { return group.world_rank(r); };
  if (!same) throw_mismatch(group.world(), published, world_rank);
  check_counts(mine.collective(), group.world(), published, world_rank);
}

}  // namespace

Agreement await_entries(Group& group, const CallFingerprint& mine, uint64_t run,
                        const std::byte* staged, const OpContext& context) {
  Agreement agreed{{mine.fingerprint.pieces}, mine.has(Fingerprint::zero_copy)};
  const uint64_t hash = mine.fingerprint.fingerprint_hash;
  bool same = true;
  for (Rank r = 0; r < group.world(); ++r) {
    if (r == group.rank()) continue;
    // The peer may have written already what is read next.
    if (staged != nullptr) __builtin_prefetch(staged + r * group.layout().staging_step());
    const Fingerprint& theirs = group.await_entry(r, at_run(run) + 1, context).fingerprint;
    same &= is_same(theirs, hash);
    agreed.pieces.count = std::max(agreed.pieces.count, theirs.pieces);
    agreed.zero_copy &= (theirs.flags & Fingerprint::zero_copy) != 0;
  }
  if (!same || mine.has(Fingerprint::irregular)) [[unlikely]]
    check(group, mine, same);
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
