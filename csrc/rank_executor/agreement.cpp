// See agreement.h. The error message is built only from the FingerprintDetails of rank 0 and of one
// rank that differs from it, the same on all ranks, so all ranks throw the same message.
#include "agreement.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../group/hasher.h"
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

// Numbers of sent and received elements by peer, stored behind FingerprintDetails.
struct Counts {
  uint64_t *sent, *received;
};
Counts counts(Group& group, Rank r, uint64_t call) {
  auto* sent = reinterpret_cast<uint64_t*>(&group.fingerprint_details(r, call) + 1);
  return {sent, sent + group.world()};
}

void write_counts(Group& group, const CollectiveRequest& r, uint64_t call) {
  const auto [sent, received] = counts(group, group.rank(), call);
  const int world = group.world();
  auto fill = [&](uint64_t* to, const CallBuffer& buffer, BlockContent holds) {
    const bool is_own = holds == BlockContent::own_block;
    for (Rank peer = 0; peer < world; ++peer)
      to[peer] = buffer.blocks.empty() ? 0
                 : !is_own             ? buffer.blocks[peer]
                                       : (peer == r.root ? sum(buffer.blocks) : 0);
  };
  fill(sent, r.input, input_of(r.collective, r.in_place));
  fill(received, r.output, output_of(r.collective, r.in_place));
}

bool same(const Fingerprint& fingerprint, uint64_t fingerprint_hash) {
  return fingerprint.fingerprint_hash == fingerprint_hash &&
         (fingerprint.flags & Fingerprint::refused) == 0;
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
  if (tensors == 0 &&
      (d.flags & FingerprintDetails::on_gpus) != 0)  // rendezvous of the GPU transport
    return collective == Collective::barrier
               ? "init_process_group with a device_id"
               : description + " of tensors on GPUs, for the first time";
  const std::string part = d.parts > 1       ? text(", part ", d.part + 1, " of ", d.parts)
                           : other.parts > 1 ? ", by itself"
                                             : "";
  if (collective == Collective::barrier) return description + part;
  description += text(" of ", d.elements, " ", name_or_number(kDTypeNames, d.dtype));
  if (reduces(collective)) description += text(", op ", name_or_number(kReduceOpNames, d.op));
  if (has_root(collective)) description += text(", root ", d.root);
  if (tensors != other_tensors && other_tensors != 0)
    description += text(", in ", tensors, " tensors");
  const uint8_t unlike = d.flags ^ other.flags;
  if ((unlike & FingerprintDetails::in_place) != 0)
    description += (d.flags & FingerprintDetails::in_place) != 0 ? ", in place" : ", out of place";
  if ((unlike & FingerprintDetails::on_gpus) != 0)
    description += (d.flags & FingerprintDetails::on_gpus) != 0 ? ", on GPUs" : ", on the host";
  return description + part;
}

std::string mismatch_message(Group& group, Rank r, uint64_t call) {
  const FingerprintDetails &one = group.fingerprint_details(r, call),
                           &zero = group.fingerprint_details(0, call);
  const std::string mine = describe_call(one, zero), theirs = describe_call(zero, one);
  std::string description = text("all ranks of a group must make the same call: rank ", r,
                                 " called ", mine, ", rank 0 called ", theirs);
  if (mine == theirs)
    description += one.options >> 32 != zero.options >> 32
                       ? ", but with different algorithms"
                       : ", but with tensors of different sizes";
  return description;
}

[[noreturn]] void throw_mismatch(Group& group, uint64_t call) {
  const auto fingerprint = [&](Rank r) -> const Fingerprint& {
    return group.rank_state(r).fingerprints[call & 1];
  };
  for (Rank r = 0; r < group.world(); ++r)
    if ((fingerprint(r).flags & Fingerprint::refused) != 0) {
      const FingerprintDetails& d = group.fingerprint_details(r, call);
      throw std::invalid_argument(text("rank ", r, " refused ", read_text(d.refusal)));
    }
  // Prefer a rank whose number of requests differs from rank 0's, which the message then names.
  const auto parts = [&](Rank r) { return group.fingerprint_details(r, call).parts; };
  Rank r = 1;
  while (r < group.world() && parts(r) == parts(0)) ++r;
  if (r == group.world()) r = 1;
  while (r + 1 < group.world() && same(fingerprint(r), fingerprint(0).fingerprint_hash)) ++r;
  throw std::invalid_argument(mismatch_message(group, r, call));
}

// Throws std::invalid_argument if a rank sends a peer more or fewer elements than the peer
// receives.
void check_counts(Group& group, const CallFingerprint& s) {
  for (Rank from = 0; from < group.world(); ++from)
    for (Rank to = 0; to < group.world(); ++to) {
      const uint64_t sent = counts(group, from, s.call).sent[to];
      const uint64_t received = counts(group, to, s.call).received[from];
      require(sent == received, name(s.collective), ": rank ", from, " sends ", sent,
              " elements to rank ", to, ", which has room for ", received);
    }
}

void describe(FingerprintDetails& d, const CallFingerprint& s) {
  d.collective = static_cast<uint8_t>(s.collective);
  d.call = s.call;
  d.part = s.part;
  d.parts = s.parts;
}

}  // namespace

uint64_t fingerprint_hash(const CollectiveRequest& r, uint64_t call) {
  Hasher h;
  h.add(static_cast<uint64_t>(r.collective) | static_cast<uint64_t>(r.dtype) << 8 |
        (reduces(r.collective) ? static_cast<uint64_t>(r.op) : 0) << 16 |
        uint64_t{r.in_place} << 24 | uint64_t{r.irregular} << 25 | uint64_t{r.on_gpus} << 26 |
        static_cast<uint64_t>(has_root(r.collective) ? r.root : 0) << 32);
  h.add(call);
  h.add(options(r));
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
      request.collective, call, {.fingerprint_hash = fingerprint_hash(request, call), .pieces = 1}};
  if (request.irregular) mine.fingerprint.flags |= Fingerprint::irregular;
  return mine;
}

uint64_t run_number(const Group& group) {
  const RankState& state = group.rank_state(group.rank());
  const uint64_t progress = state.progress.load(std::memory_order_relaxed);
  const uint64_t ended = state.ended.load(std::memory_order_relaxed);
  return (reached(ended, progress) ? ended : progress) >> kTaskBits;
}

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
  FingerprintDetails& d = group.fingerprint_details(group.rank(), s.call);
  describe(d, s);
  if (request != nullptr) {
    d.dtype = static_cast<uint8_t>(request->dtype);
    d.op = static_cast<uint8_t>(request->op);
    d.flags = static_cast<uint8_t>((request->in_place ? FingerprintDetails::in_place : 0) |
                                   (request->on_gpus ? FingerprintDetails::on_gpus : 0));
    d.root = request->root;
    d.elements = elements(*request);
    d.options = options(*request);
    if (request->irregular) write_counts(group, *request, s.call);
  }
  RankState& state = group.rank_state(group.rank());
  state.fingerprints[s.call & 1] = s.fingerprint;
  if ((s.fingerprint.flags & Fingerprint::zero_copy) != 0)
    state.registered[s.call & 1] = s.registered;
}

void publish_refusal(Group& group, const CallFingerprint& s, std::string_view why) {
  FingerprintDetails& d = group.fingerprint_details(group.rank(), s.call);
  describe(d, s);
  const std::size_t n = std::min(why.size(), d.refusal.size() - 1);
  std::memcpy(d.refusal.data(), why.data(), n);
  d.refusal[n] = '\0';
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
    alike &= same(fingerprint, mine.fingerprint.fingerprint_hash);
    agreed.pieces = std::max(agreed.pieces, fingerprint.pieces);
    agreed.zero_copy &= (fingerprint.flags & Fingerprint::zero_copy) != 0;
  }
  if (!alike) [[unlikely]]
    throw_mismatch(group, mine.call);
  if ((mine.fingerprint.flags & Fingerprint::irregular) != 0) check_counts(group, mine);
  return agreed;
}

Agreement publish_and_agree(Group& group, const CallFingerprint& mine,
                            const CollectiveRequest& request, const OpContext& context) {
  group.require_healthy(context);
  const uint64_t run = run_number(group);
  begin(group, run, context);
  publish(group, mine, &request);
  group.advance(at_run(run + 1));
  return agree(group, mine, run, context);
}

bool all_publish_as_many(Group& group, const CallFingerprint& mine) {
  for (Rank r = 0; r < group.world(); ++r) {
    const Fingerprint& fingerprint = group.rank_state(r).fingerprints[mine.call & 1];
    if ((fingerprint.flags & Fingerprint::refused) != 0) return false;
    if (group.fingerprint_details(r, mine.call).parts != mine.parts) return false;
  }
  return true;
}

}  // namespace pycollect::ipc
