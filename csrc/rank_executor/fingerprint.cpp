// See fingerprint.h.
#include "fingerprint.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

uint32_t hash(std::string_view text) {
  uint32_t h = 2166136261U;  // FNV-1a
  for (const char c : text) h = (h ^ static_cast<uint8_t>(c)) * 16777619U;
  return h;
}

bool reduces(Collective c) {
  return c == Collective::all_reduce || c == Collective::reduce || c == Collective::reduce_scatter;
}
bool has_root(Collective c) {
  return c == Collective::reduce || c == Collective::broadcast || c == Collective::scatter ||
         c == Collective::gather;
}
uint64_t options(const CollectiveRequest& r) {
  return uint64_t{hash(r.algorithm)} << 32 | r.tensors;
}

// Returns the number of elements that error messages name: of the rank's input, or of its output if
// it has no input.
uint64_t elements(const CollectiveRequest& r) {
  return total(r.input.blocks.empty() ? r.output : r.input);
}

// Hashes the block sizes that must agree, as far as every rank can compute them: the blocks of all
// ranks, or one block where all are equal.
void add_blocks(Hasher& h, const CollectiveRequest& r) {
  const BlockContent in = input_of(r.collective, r.in_place),
                     out = output_of(r.collective, r.in_place);
  const bool from_input = r.in_place || r.output.blocks.empty() ||
                          (in == BlockContent::all_blocks && !r.input.blocks.empty());
  const CallBuffer& buffer = from_input ? r.input : r.output;
  const bool one = r.collective == Collective::all_to_all || r.collective == Collective::gather ||
                   r.collective == Collective::scatter;
  h.add(buffer.cuts);
  if ((from_input ? in : out) == BlockContent::own_block)
    h.add(total(buffer));
  else if (one)
    h.add(buffer.blocks.empty() ? 0 : buffer.blocks[0]);
  else
    for (const std::size_t block : buffer.blocks) h.add(block);
}

// Returns names[i], or "number i" for an index out of range, which a peer may have written.
template <std::size_t n>
std::string name_or_number(const std::array<const char*, n>& names, std::size_t i) {
  return i < n ? names[i] : text("number ", i);
}

std::string describe_call(const CallDescription& d, const CallDescription& other) {
  const auto collective = static_cast<Collective>(d.collective);
  std::string description = name_or_number(kCollectiveNames, d.collective);
  if (d.call != other.call) description += text(" as its call ", d.call);
  const auto tensors = static_cast<uint32_t>(d.options),
             other_tensors = static_cast<uint32_t>(other.options);
  const std::string part = d.parts > 1       ? text(", part ", d.part + 1, " of ", d.parts)
                           : other.parts > 1 ? ", by itself"
                                             : "";
  if (collective == Collective::barrier) return description + part;
  description += text(" of ", d.elements, " ", name_or_number(kAllDTypeNames, d.dtype));
  if (reduces(collective)) description += text(", op ", name_or_number(kReduceOpNames, d.op));
  if (has_root(collective)) description += text(", root ", d.root);
  if ((d.flags & CallDescription::sparse) != 0) description += ", in sparse tensors";
  if (tensors != other_tensors && other_tensors != 0)
    description += text(", in ", tensors, " tensors");
  const uint8_t unlike = d.flags ^ other.flags;
  if ((unlike & CallDescription::in_place) != 0)
    description += (d.flags & CallDescription::in_place) != 0 ? ", in place" : ", out of place";
  return description + part;
}

struct CallOfRank {
  Rank rank;
  const CallDescription& details;
};
std::string mismatch_message(const CallOfRank& of_one, const CallOfRank& of_zero) {
  const CallDescription &one = of_one.details, &zero = of_zero.details;
  const std::string mine = describe_call(one, zero), theirs = describe_call(zero, one);
  std::string description = text("all ranks of a group must make the same call: rank ", of_one.rank,
                                 " called ", mine, ", rank ", of_zero.rank, " called ", theirs);
  if (mine == theirs)
    description += one.options >> 32 != zero.options >> 32 ? ", but with different algorithms"
                   : (one.flags & CallDescription::sparse) != 0
                       ? ", but with different shapes or numbers of sparse dimensions"
                       : ", but with tensors of different sizes";
  return description;
}

}  // namespace

void throw_mismatch(int world, const PublishedCalls& published, const WorldRank& world_rank) {
  for (Rank r = 0; r < world; ++r)
    if ((published(r).fingerprint.flags & Fingerprint::refused) != 0)
      throw std::invalid_argument(
          text("rank ", world_rank(r), " refused ", read_text(published(r).details.refusal)));
  // Prefer a rank whose number of requests differs from rank 0's, which the message then names.
  const auto parts = [&](Rank r) { return published(r).details.parts; };
  const uint64_t hash = published(0).fingerprint.fingerprint_hash;
  Rank r = 1;
  while (r < world && parts(r) == parts(0)) ++r;
  if (r == world) r = 1;
  while (r + 1 < world && is_same(published(r).fingerprint, hash)) ++r;
  throw std::invalid_argument(mismatch_message({world_rank(r), published(r).details},
                                               {world_rank(0), published(0).details}));
}

void check_count(Collective collective, Rank from, uint64_t sent, Rank to, uint64_t received) {
  require(sent == received, name(collective), ": rank ", from, " sends ", sent,
          " elements to rank ", to, ", which has room for ", received);
}

void check_counts(Collective collective, int world, const PublishedCalls& published,
                  const WorldRank& world_rank) {
  for (Rank from = 0; from < world; ++from)
    for (Rank to = 0; to < world; ++to)
      check_count(collective, world_rank(from), published(from).counts.sent[to], world_rank(to),
                  published(to).counts.received[from]);
}

void write_counts(const ElementCounts& to, const CollectiveRequest& r, int world) {
  const auto fill = [&](uint64_t* counts, const CallBuffer& buffer, BlockContent holds) {
    const bool is_own = holds == BlockContent::own_block;
    for (Rank peer = 0; peer < world; ++peer)
      counts[peer] = buffer.blocks.empty() ? 0
                     : !is_own             ? buffer.blocks[peer]
                                           : (peer == r.root ? total(buffer) : 0);
  };
  fill(to.sent, r.input, input_of(r.collective, r.in_place));
  fill(to.received, r.output, output_of(r.collective, r.in_place));
}

void describe_refusal(FingerprintDetails& d, std::string_view why) {
  const std::size_t n = std::min(why.size(), d.refusal.size() - 1);
  std::memcpy(d.refusal.data(), why.data(), n);
  d.refusal[n] = '\0';
}

namespace {

CallDescription description_of(const CollectiveRequest& r) {
  CallDescription d;
  d.collective = static_cast<uint8_t>(r.user_collective());
  d.dtype = r.sparse ? static_cast<uint8_t>(r.sparse->dtype) : r.dtype_number();
  d.op = static_cast<uint8_t>(r.sparse ? r.sparse->op : r.op);
  d.flags = static_cast<uint8_t>((r.in_place || r.sparse ? CallDescription::in_place : 0) |
                                 (r.sparse ? CallDescription::sparse : 0));
  d.root = r.root;
  d.elements = r.sparse ? r.sparse->elements : elements(r);
  d.options = options(r);
  return d;
}

}  // namespace

uint64_t fingerprint_hash(const CollectiveRequest& r) {
  Hasher h;
  h.add(static_cast<uint64_t>(r.collective) | uint64_t{r.dtype_number()} << 8 |
        (reduces(r.collective) ? static_cast<uint64_t>(r.op) : 0) << 16 |
        uint64_t{r.in_place} << 24 | uint64_t{r.irregular} << 25 |
        (reduces(r.collective) ? static_cast<uint64_t>(r.options.order) : 0) << 26 |
        static_cast<uint64_t>(has_root(r.collective) ? r.root : 0) << 32);
  h.add(options(r));
  if (r.sparse) h.add(r.sparse->shapes);
  if (!r.irregular && r.tensors != 0) add_blocks(h, r);
  return h.value();
}

CallFingerprint common_fingerprint(const CollectiveRequest& request) {
  CallFingerprint common{description_of(request),
                         {.fingerprint_hash = fingerprint_hash(request), .pieces = 1}};
  if (request.irregular) common.fingerprint.flags |= Fingerprint::irregular;
  return common;
}

CallFingerprint fingerprint_of(const CollectiveRequest& request, uint64_t call) {
  return numbered(common_fingerprint(request), call);
}

CallFingerprint fingerprint_of(const std::vector<const CollectiveRequest*>& requests,
                               uint64_t call) {
  CallFingerprint all{description_of(*requests.front())};
  all.description.parts = static_cast<uint32_t>(requests.size());
  Hasher h;
  for (const CollectiveRequest* r : requests) h.add(fingerprint_hash(*r));
  all.fingerprint.fingerprint_hash = h.value();
  return numbered(all, call);
}

CallFingerprint refusal_of(Collective collective, uint64_t call) {
  CallFingerprint mine{.fingerprint = {.flags = Fingerprint::refused}};
  mine.description.collective = static_cast<uint8_t>(collective);
  mine.description.call = call;
  return mine;
}

}  // namespace pycollect::ipc
