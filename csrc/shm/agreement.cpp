// See agreement.h. The sentence that says what differs is made from the descriptions alone, of the
// first rank that is unlike rank 0, so that all ranks make the same one.
#include "agreement.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "../plan/error.h"
#include "hashing.h"

namespace pycollect::shm {
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
uint64_t options(const Request& r) { return uint64_t{hash(r.algorithm)} << 32 | r.tensors; }

// As the caller sees it: what the rank brings, or gets if it brings nothing.
uint64_t elements(const Request& r) {
  return sum(r.input.blocks.empty() ? r.output.blocks : r.input.blocks);
}

// What all ranks must give alike, whatever of it a rank can know: the blocks of all ranks, or one
// of them where all are equal.
void add_blocks(Hashing& h, const Request& r) {
  const Holds in = input_of(r.collective, r.in_place), out = output_of(r.collective, r.in_place);
  const bool from_input =
      r.in_place || r.output.blocks.empty() || (in == Holds::all_blocks && !r.input.blocks.empty());
  const Side& side = from_input ? r.input : r.output;
  const bool one = r.collective == Collective::all_to_all || r.collective == Collective::gather ||
                   r.collective == Collective::scatter;
  h.add(side.cuts);
  if ((from_input ? in : out) == Holds::own_block)
    h.add(sum(side.blocks));
  else if (one)
    h.add(side.blocks.empty() ? 0 : side.blocks[0]);
  else
    for (const std::size_t block : side.blocks) h.add(block);
}

// Sent and received elements, by peer, behind the description.
struct Counts {
  uint64_t *sent, *received;
};
Counts counts(Group& group, Rank r, uint64_t call) {
  auto* sent = reinterpret_cast<uint64_t*>(&group.description(r, call) + 1);
  return {sent, sent + group.world()};
}

void write_counts(Group& group, const Request& r, uint64_t call) {
  const auto [sent, received] = counts(group, group.rank(), call);
  const int world = group.world();
  auto fill = [&](uint64_t* to, const Side& side, Holds holds) {
    const bool is_own = holds == Holds::own_block;
    for (Rank peer = 0; peer < world; ++peer)
      to[peer] = side.blocks.empty() ? 0
                 : !is_own           ? side.blocks[peer]
                                     : (peer == r.root ? sum(side.blocks) : 0);
  };
  fill(sent, r.input, input_of(r.collective, r.in_place));
  fill(received, r.output, output_of(r.collective, r.in_place));
}

bool same(const Post& post, uint64_t signature) {
  return post.signature == signature && (post.flags & Post::refused) == 0;
}

// Also of a number that is none of them, as a rank can have written.
template <std::size_t n>
std::string one_of(const std::array<const char*, n>& names, std::size_t i) {
  return i < n ? names[i] : text("number ", i);
}

std::string words(const Description& d, const Description& other) {
  const auto collective = static_cast<Collective>(d.collective);
  std::string said = one_of(kCollectiveNames, d.collective);
  if (d.call != other.call) said += text(" as its call ", d.call);
  const auto tensors = static_cast<uint32_t>(d.options),
             other_tensors = static_cast<uint32_t>(other.options);
  if (tensors == 0 && (d.flags & Description::on_gpus) != 0)  // the ranks are to meet
    return collective == Collective::barrier ? "init_process_group with a device_id"
                                             : said + " of tensors on GPUs, for the first time";
  const std::string part = d.parts > 1       ? text(", part ", d.part + 1, " of ", d.parts)
                           : other.parts > 1 ? ", by itself"
                                             : "";
  if (collective == Collective::barrier) return said + part;
  said += text(" of ", d.elements, " ", one_of(kDTypeNames, d.dtype));
  if (reduces(collective)) said += text(", op ", one_of(kReduceOpNames, d.op));
  if (has_root(collective)) said += text(", root ", d.root);
  if (tensors != other_tensors && other_tensors != 0) said += text(", in ", tensors, " tensors");
  const uint8_t unlike = d.flags ^ other.flags;
  if ((unlike & Description::in_place) != 0)
    said += (d.flags & Description::in_place) != 0 ? ", in place" : ", out of place";
  if ((unlike & Description::on_gpus) != 0)
    said += (d.flags & Description::on_gpus) != 0 ? ", on GPUs" : ", on the host";
  return said + part;
}

std::string difference(Group& group, Rank r, uint64_t call) {
  const Description &one = group.description(r, call), &zero = group.description(0, call);
  const std::string mine = words(one, zero), theirs = words(zero, one);
  std::string said = text("ranks of a group must call the same: rank ", r, " called ", mine,
                          ", rank 0 called ", theirs);
  if (mine == theirs)
    said += one.options >> 32 != zero.options >> 32 ? ", but with different algorithms"
                                                    : ", but with tensors of different sizes";
  return said;
}

[[noreturn]] void refuse_difference(Group& group, uint64_t call) {
  const auto post = [&](Rank r) -> const Post& { return group.line(r).posts[call & 1]; };
  for (Rank r = 0; r < group.world(); ++r)
    if ((post(r).flags & Post::refused) != 0) {
      const Description& d = group.description(r, call);
      throw std::invalid_argument(text("rank ", r, " refused ", sentence(d.refusal)));
    }
  // Whoever has another number of requests than rank 0 differs in what can be named.
  const auto parts = [&](Rank r) { return group.description(r, call).parts; };
  Rank r = 1;
  while (r < group.world() && parts(r) == parts(0)) ++r;
  if (r == group.world()) r = 1;
  while (r + 1 < group.world() && same(post(r), post(0).signature)) ++r;
  throw std::invalid_argument(difference(group, r, call));
}

// Does everybody receive what is sent to it?
void check_counts(Group& group, const Statement& s) {
  for (Rank from = 0; from < group.world(); ++from)
    for (Rank to = 0; to < group.world(); ++to) {
      const uint64_t sent = counts(group, from, s.call).sent[to];
      const uint64_t received = counts(group, to, s.call).received[from];
      require(sent == received, name(s.collective), ": rank ", from, " sends ", sent,
              " elements to rank ", to, ", which has room for ", received);
    }
}

void describe(Description& d, const Statement& s) {
  d.collective = static_cast<uint8_t>(s.collective);
  d.call = s.call;
  d.part = s.part;
  d.parts = s.parts;
}

}  // namespace

uint64_t signature(const Request& r, uint64_t call) {
  Hashing h;
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

uint64_t signature(const std::vector<const Request*>& requests, uint64_t call) {
  Hashing h;
  h.add(requests.size());
  for (const Request* r : requests) h.add(signature(*r, call));
  return h.value();
}

Statement statement(const Request& request, uint64_t call) {
  Statement mine{request.collective, call, {.signature = signature(request, call), .pieces = 1}};
  if (request.irregular) mine.post.flags |= Post::irregular;
  return mine;
}

uint64_t run_number(const Group& group) {
  const Line& line = group.line(group.rank());
  const uint64_t done = line.done.load(std::memory_order_relaxed);
  const uint64_t ended = line.ended.load(std::memory_order_relaxed);
  return (reached(ended, done) ? ended : done) >> kTaskBits;
}

void settle(Group& group, uint64_t run, const Occasion& occasion) {
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) group.await(r, at_run(run - 1), occasion);
}

void begin(Group& group, uint64_t run, const Occasion& occasion) {
  const Post& last = group.line(group.rank()).posts[(occasion.call - 1) & 1];
  const bool refused = (last.flags & Post::refused) != 0;
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) group.await(r, at_run(run - 1) + refused, occasion);
}

void state(Group& group, const Statement& s, const Request* request) {
  Description& d = group.description(group.rank(), s.call);
  describe(d, s);
  if (request != nullptr) {
    d.dtype = static_cast<uint8_t>(request->dtype);
    d.op = static_cast<uint8_t>(request->op);
    d.flags = static_cast<uint8_t>((request->in_place ? Description::in_place : 0) |
                                   (request->on_gpus ? Description::on_gpus : 0));
    d.root = request->root;
    d.elements = elements(*request);
    d.options = options(*request);
    if (request->irregular) write_counts(group, *request, s.call);
  }
  Line& line = group.line(group.rank());
  line.posts[s.call & 1] = s.post;
  if ((s.post.flags & Post::placed) != 0) line.places[s.call & 1] = s.places;
}

void state_refusal(Group& group, const Statement& s, std::string_view why) {
  Description& d = group.description(group.rank(), s.call);
  describe(d, s);
  const std::size_t n = std::min(why.size(), d.refusal.size() - 1);
  std::memcpy(d.refusal.data(), why.data(), n);
  d.refusal[n] = '\0';
  group.line(group.rank()).posts[s.call & 1] = s.post;
}

Agreed agree(Group& group, const Statement& mine, uint64_t run, const Occasion& occasion) {
  const uint64_t entered = at_run(run) + 1;
  for (Rank r = 0; r < group.world(); ++r)
    if (r != group.rank()) {
      __builtin_prefetch(group.slot(r, run));  // what is wanted next, if it has been written
      group.await(r, entered, occasion);
    }
  Agreed agreed;
  bool alike = true;
  for (Rank r = 0; r < group.world(); ++r) {
    const Post& post = group.line(r).posts[mine.call & 1];
    alike &= same(post, mine.post.signature);
    agreed.pieces = std::max(agreed.pieces, post.pieces);
    agreed.placed &= (post.flags & Post::placed) != 0;
  }
  if (!alike) [[unlikely]]
    refuse_difference(group, mine.call);
  if ((mine.post.flags & Post::irregular) != 0) check_counts(group, mine);
  return agreed;
}

Agreed exchange(Group& group, const Statement& mine, const Request& request,
                const Occasion& occasion) {
  group.require_whole(occasion);
  const uint64_t run = run_number(group);
  begin(group, run, occasion);
  state(group, mine, &request);
  group.advance(at_run(run + 1));
  return agree(group, mine, run, occasion);
}

bool all_state_as_many(Group& group, const Statement& mine) {
  for (Rank r = 0; r < group.world(); ++r) {
    const Post& post = group.line(r).posts[mine.call & 1];
    if ((post.flags & Post::refused) != 0) return false;
    if (group.description(r, mine.call).parts != mine.parts) return false;
  }
  return true;
}

}  // namespace pycollect::shm
