// Fingerprints of collective calls, which show whether all ranks make the same call, and the error
// messages if they do not. Knows nothing of how the ranks exchange fingerprints.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "../group/segment_layout.h"
#include "request.h"

namespace pycollect::ipc {

// Hash of 64-bit words for fingerprints that ranks compare. Not cryptographic.
class Hasher {
 public:
  // Multiplies, and combines the halves of the product: takes a few cycles, and every bit of a word
  // affects all bits of the hash.
  void add(uint64_t word) {
    const auto wide = static_cast<unsigned __int128>(state_ ^ word) * 0x9e3779b97f4a7c15U;
    state_ = static_cast<uint64_t>(wide) ^ static_cast<uint64_t>(wide >> 64) ^ 0x2545f4914f6cdd1dU;
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x6a09e667f3bcc909U;
};

// Fingerprint of a collective call as this rank publishes it.
struct CallFingerprint {
  CallDescription description = {};
  Fingerprint fingerprint = {};
  RegisteredOffsets registered = {};

  Collective collective() const { return static_cast<Collective>(description.collective); }
  bool has(uint32_t flag) const { return (fingerprint.flags & flag) != 0; }
  void set_registered(const std::optional<RegisteredOffsets>& found) {
    if (!found) return;
    registered = *found;
    fingerprint.flags |= Fingerprint::zero_copy;
  }
};

// Returns a hash that is equal on ranks that make the same request.
uint64_t fingerprint_hash(const CollectiveRequest& request);
// Returns the fingerprint of `request` with one piece and without registered offsets.
CallFingerprint fingerprint_of(const CollectiveRequest& request, uint64_t call);
// The same as two steps: what calls of the same request have in common, and what one call adds.
CallFingerprint common_fingerprint(const CollectiveRequest& request);
inline CallFingerprint numbered(const CallFingerprint& common, uint64_t call) {
  CallFingerprint mine = common;
  mine.description.call = call;
  Hasher h;
  h.add(common.fingerprint.fingerprint_hash);
  h.add(call);
  mine.fingerprint.fingerprint_hash = h.value();
  return mine;
}
// Returns the fingerprint of several requests, which one agreement compares together.
CallFingerprint fingerprint_of(const std::vector<const CollectiveRequest*>& requests,
                               uint64_t call);
CallFingerprint refusal_of(Collective collective, uint64_t call);

// Numbers of elements that a rank sends to each peer, and receives from each, in an irregular call.
struct ElementCounts {
  uint64_t *sent, *received;  // [rank of the world]
};
void write_counts(const ElementCounts& to, const CollectiveRequest& request, int world);

// Write the details of a fingerprint, and the reason for a refusal.
inline void describe(FingerprintDetails& details, const CallFingerprint& mine) {
  static_cast<CallDescription&>(details) = mine.description;
}
void describe_refusal(FingerprintDetails& details, std::string_view why);

// What one rank has published about a call.
struct PublishedCall {
  const Fingerprint& fingerprint;
  const FingerprintDetails& details;
  ElementCounts counts = {};  // of an irregular call
};
using PublishedCalls = std::function<PublishedCall(Rank)>;

// Returns whether the rank makes the call with this hash, and has not refused it.
inline bool is_same(const Fingerprint& fingerprint, uint64_t fingerprint_hash) {
  return fingerprint.fingerprint_hash == fingerprint_hash &&
         (fingerprint.flags & Fingerprint::refused) == 0;
}

// Returns the number in the world of a rank of the group.
using WorldRank = std::function<Rank(Rank)>;
inline Rank same_rank(Rank r) { return r; }

// Throws std::invalid_argument for calls that differ or that a rank has refused. The message is
// built only from what rank 0 and one rank that differs from it have published, so all ranks throw
// the same message.
[[noreturn]] void throw_mismatch(int world, const PublishedCalls& published,
                                 const WorldRank& world_rank = same_rank);

// Throws std::invalid_argument if a rank sends a peer more or fewer elements than the peer
// receives.
void check_counts(Collective collective, int world, const PublishedCalls& published,
                  const WorldRank& world_rank = same_rank);
void check_count(Collective collective, Rank from, uint64_t sent, Rank to, uint64_t received);

}  // namespace pycollect::ipc
