// See fingerprint.h.
#include "fingerprint.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../group/hasher.h"
#include "../plan/error.h"
#include "call_buffers.h"

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
std::size_t sum(const Sizes& blocks) {
  std::size_t all = 0;
  for (std::size_t n : blocks) all += n;
  return all;
}
uint64_t options(const CollectiveRequest& r) {
  return uint64_t{hash(r.algorithm)} << 32 | r.tensors;
}

// Returns the number of elements that error messages name: of the rank's input, or of its output if
// it has no input.
uint64_t elements(const CollectiveRequest& r) {
  return sum(r.input.blocks.empty() ? r.output.blocks : r.input.blocks);
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
    h.add(sum(buffer.blocks));
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

std::string describe_call(const FingerprintDetails& d, const FingerprintDetails& other) {
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
  if ((d.flags & FingerprintDetails::sparse) != 0) description += ", in sparse tensors";
  if (tensors != other_tensors && other_tensors != 0)
    description += text(", in ", tensors, " tensors");
  const uint8_t unlike = d.flags ^ other.flags;
  if ((unlike & FingerprintDetails::in_place) != 0)
    description += (d.flags & FingerprintDetails::in_place) != 0 ? ", in place" : ", out of place";
  return description + part;
}

struct CallOfRank {
  Rank rank;
  const FingerprintDetails& details;
};
std::string mismatch_message(const CallOfRank& of_one, const CallOfRank& of_zero) {
  const FingerprintDetails &one = of_one.details, &zero = of_zero.details;
  const std::string mine = describe_call(one, zero), theirs = describe_call(zero, one);
  std::string description = text("all ranks of a group must make the same call: rank ", of_one.rank,
                                 " called ", mine, ", rank ", of_zero.rank, " called ", theirs);
  if (mine == theirs)
    description += one.options >> 32 != zero.options >> 32 ? ", but with different algorithms"
                   : (one.flags & FingerprintDetails::sparse) != 0
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
      check_count(collective, world_rank(from), published(from).counts.sent[world_rank(to)],
                  world_rank(to), published(to).counts.received[world_rank(from)]);
}

void write_counts(const ElementCounts& to, const CollectiveRequest& r, int world) {
  const auto fill = [&](uint64_t* counts, const CallBuffer& buffer, BlockContent holds) {
    const bool is_own = holds == BlockContent::own_block;
    for (Rank peer = 0; peer < world; ++peer)
      counts[peer] = buffer.blocks.empty() ? 0
                     : !is_own             ? buffer.blocks[peer]
                                           : (peer == r.root ? sum(buffer.blocks) : 0);
  };
  fill(to.sent, r.input, input_of(r.collective, r.in_place));
  fill(to.received, r.output, output_of(r.collective, r.in_place));
}

void describe(FingerprintDetails& d, const CallFingerprint& s, const CollectiveRequest* request) {
  d.collective = static_cast<uint8_t>(s.collective);
  d.call = s.call;
  d.part = s.part;
  d.parts = s.parts;
  if (request == nullptr) return;
  const SparseForm* const sparse = request->sparse;
  d.dtype = sparse ? static_cast<uint8_t>(sparse->dtype) : request->dtype_number();
  d.op = static_cast<uint8_t>(sparse ? sparse->op : request->op);
  d.flags = static_cast<uint8_t>((request->in_place || sparse ? FingerprintDetails::in_place : 0) |
                                 (sparse ? FingerprintDetails::sparse : 0));
  d.root = request->root;
  d.elements = sparse ? sparse->elements : elements(*request);
  d.options = options(*request);
}

void describe_refusal(FingerprintDetails& d, const CallFingerprint& s, std::string_view why) {
  describe(d, s, nullptr);
  const std::size_t n = std::min(why.size(), d.refusal.size() - 1);
  std::memcpy(d.refusal.data(), why.data(), n);
  d.refusal[n] = '\0';
}

uint64_t fingerprint_hash(const CollectiveRequest& r, uint64_t call) {
  Hasher h;
  h.add(static_cast<uint64_t>(r.collective) | uint64_t{r.dtype_number()} << 8 |
        (reduces(r.collective) ? static_cast<uint64_t>(r.op) : 0) << 16 |
        uint64_t{r.in_place} << 24 | uint64_t{r.irregular} << 25 |
        static_cast<uint64_t>(has_root(r.collective) ? r.root : 0) << 32);
  h.add(call);
  h.add(options(r));
  if (r.sparse) h.add(r.sparse->shapes);
  if (r.irregular || r.tensors == 0) return h.value();
  add_blocks(h, r);
  return h.value();
}

uint64_t fingerprint_hash(const std::vector<const CollectiveRequest*>& requests, uint64_t call) {
  Hasher h;
  h.add(requests.size());
  for (const CollectiveRequest* r : requests) h.add(fingerprint_hash(*r, call));
  return h.value();
}

CallFingerprint fingerprint_of(const CollectiveRequest& request, uint64_t call) {
  CallFingerprint mine{
      request.called(), call, {.fingerprint_hash = fingerprint_hash(request, call), .pieces = 1}};
  if (request.irregular) mine.fingerprint.flags |= Fingerprint::irregular;
  return mine;
}

}  // namespace pycollect::ipc
