// See hosts_call.h.
#include "hosts_call.h"

#include <algorithm>
#include <utility>

#include "../plan/error.h"
#include "sum_chain.h"

namespace pycollect::ipc {
namespace {

// Most bytes of a piece of a copy, and of those that a rank receives at a time; and how many pieces
// it receives ahead.
constexpr std::size_t kPieceBytes = 512 * 1024, kPiecesBytes = 4 << 20, kPosted = 6;

}  // namespace

HostsCall::HostsCall(HostsExecutor& executor, const CollectiveRequest& request)
    : executor_(executor),
      r_(request),
      hosts_(executor.hosts()),
      host_(executor.host()),
      me_(executor.rank()),
      index_(hosts_.index(me_)),
      item_(item_bytes(request.dtype)),
      row_(request.dtype, request.op, of_world(request.options, hosts_.world())),
      out_(request.in_place ? request.input : request.output) {}

void HostsCall::run() {
  switch (r_.collective) {
    case Collective::barrier:
      return;
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::reduce_scatter:
      // The order in which integers are added makes no difference.
      if (hosts_.in_rank_order() || is_integer(r_.dtype))
        SumChain(*this).run();
      else
        add_parts();
      break;
    case Collective::broadcast:
      broadcast();
      break;
    case Collective::all_gather:
      all_gather();
      break;
    default:
      exchange_blocks();
  }
  executor_.await_sends();
}

// --- slices between hosts, and calls of this host's ranks

// Returns how many elements a piece has, if as many come from `peers` ranks at a time. That number
// must be the same on all ranks, because the pieces of two ranks are messages between them.
std::size_t HostsCall::piece_elements(std::size_t peers) const {
  return std::max(std::min(kPieceBytes, kPiecesBytes / std::max<std::size_t>(peers, 1)) / item_,
                  std::size_t{1});
}

void HostsCall::send(Rank to, const Spans& from) {
  const std::size_t n = elements(from);
  if (n == 0) return;
  const std::shared_ptr<std::byte[]> packed(new std::byte[n * item_]);
  copy({{packed.get(), n}}, from, item_);
  executor_.send(to, packed.get(), n * item_, packed);
}

void HostsCall::post(Rank from, Spans to) {
  const std::size_t n = elements(to);
  if (n == 0) return;
  const std::shared_ptr<std::byte[]> received(new std::byte[n * item_]);
  auto transfer = executor_.receive(from, received.get(), n * item_, received);
  arrivals_.push_back({std::move(to), received, std::move(transfer)});
}

// Waits for the oldest slices until `most_left` are left.
void HostsCall::finish(std::size_t most_left) {
  for (; arrivals_.size() > most_left; arrivals_.pop_front()) {
    const Arrival& oldest = arrivals_.front();
    executor_.await(oldest.transfer);
    copy(oldest.to, {{oldest.received.get(), elements(oldest.to)}}, item_);
  }
}

// Exchanges piece `p` with the ranks of other hosts. `from` and `to` return what comes from a rank
// in a piece, and what goes to it.
void HostsCall::exchange(std::size_t p, const PieceOf& from, const PieceOf& to) {
  const std::vector<Rank> others = hosts_.meeting_order(me_);
  const auto post_piece = [&](std::size_t q) {
    const std::size_t before = arrivals_.size();
    for (const Rank r : others) post(r, from(r, q));
    posted_.push_back(arrivals_.size() - before);
  };
  for (std::size_t q = 0; p == 0 && q < kPosted; ++q) post_piece(q);
  executor_.await_sends(kPosted * others.size());
  for (const Rank r : others) send(r, to(r, p));
  finish(arrivals_.size() - posted_.front());
  posted_.pop_front();
  post_piece(p + kPosted);
}

void HostsCall::run_here(Collective collective, const Blocks& in, const Blocks& out, bool in_place,
                         Rank root) {
  executor_.run_here({.collective = collective,
                      .dtype = r_.dtype,
                      .root = root,
                      .in_place = in_place,
                      .input = in.view(),
                      .output = out.view(),
                      .irregular = collective == Collective::all_to_all});
}

// --- sums of ranks that are not host by host

// Every rank gets all ranks' data of one part, and adds it up in the order of the call. Then the
// parts go to the ranks that want them.
void HostsCall::add_parts() {
  std::size_t largest = total(r_.input);
  if (r_.collective == Collective::reduce_scatter)
    largest = largest == 0 ? 0 : *std::ranges::max_element(r_.input.blocks);
  const std::size_t of_all = r_.collective == Collective::reduce_scatter ? 1 : hosts_.world();
  const std::size_t piece = piece_elements(1) * of_all;
  for (std::size_t begin = 0; begin < largest; begin += piece) add_part(begin, piece);
}

void HostsCall::add_part(std::size_t begin, std::size_t step) {
  const int world = hosts_.world();
  Blocks in, received, sum, out;
  const auto piece = [&](std::size_t of, std::size_t from, std::size_t count) {
    return slice(r_.input, of + from, from >= count ? 0 : std::min(step, count - from), item_);
  };
  const bool scatters = r_.collective == Collective::reduce_scatter;
  const std::size_t all = scatters ? 0 : std::min(step, total(r_.input) - begin);
  const std::size_t share = ceil_div(all, world);
  for (Rank r = 0; r < world; ++r) {
    const std::size_t from = std::min(all, r * share), n = std::min(share, all - from);
    in.add(scatters ? piece(begin_of(r_.input, r), begin, r_.input.blocks[r])
                    : slice(r_.input, begin + from, n, item_));
    if (!scatters) out.add(slice(out_, begin + from, n, item_));
  }
  const std::size_t n = in.sizes[me_];
  std::vector<std::byte> memory((world + 1) * n * item_);
  for (Rank r = 0; r < world; ++r) received.add({{memory.data() + r * n * item_, n}});
  std::byte* const result = memory.data() + world * n * item_;
  sum.add({{result, n}});
  CollectiveRequest call = r_;
  call.in_place = false;
  call.collective = Collective::all_to_all;
  call.input = in.view();
  call.output = received.view();
  HostsCall(executor_, call).run();
  std::vector<void*> from;
  for (const BufferSpan& s : received.data) from.push_back(s.base);
  void* const to = result;
  row_.run(true, {&to, 1}, {from.data(), world}, n, false);
  if (scatters) return copy(slice(out_, begin, n, item_), sum.data, item_);
  const bool wants = r_.collective == Collective::all_reduce || r_.root == me_;
  call.collective =
      r_.collective == Collective::reduce ? Collective::gather : Collective::all_gather;
  call.input = sum.view();
  call.output = wants ? out.view() : CallBuffer{};
  HostsCall(executor_, call).run();
}

// --- copies

// The data goes from host to host, in pieces. One rank of each host has it for the others.
void HostsCall::broadcast() {
  const bool is_root = me_ == r_.root;
  const CallBuffer& buffer = is_root && r_.output.blocks.empty() ? r_.input : out_;
  const std::size_t all = total(buffer), step = piece_elements(1), pieces = ceil_div(all, step);
  if (is_root && &buffer != &r_.input) copy(whole(buffer, item_), whole(r_.input, item_), item_);
  const int count = hosts_.count(), first = hosts_.of(r_.root);
  const auto head = [&](int host) { return host == first ? r_.root : rank_on(host, 0); };
  const bool is_head = head(host_) == me_;
  const bool receives = is_head && !is_root, sends = is_head && (host_ + 1) % count != first;
  const Rank before = head((host_ + count - 1) % count), after = head((host_ + 1) % count);
  const auto piece = [&](std::size_t p) {
    const std::size_t from = std::min(all, p * step);
    return slice(buffer, from, std::min(step, all - from), item_);
  };
  for (std::size_t p = 0; receives && p < kPosted; ++p) post(before, piece(p));
  for (std::size_t p = 0; p < pieces; ++p) {
    Blocks some;
    some.add(piece(p));
    if (receives) finish(arrivals_.size() - 1);
    if (receives) post(before, piece(p + kPosted));
    executor_.await_sends(kPosted);
    if (sends) send(after, some.data);
    run_here(Collective::broadcast, some, {}, true, hosts_.index(head(host_)));
  }
}

// Each rank sends its block to one rank of every other host. The ranks of a host then gather all
// blocks.
void HostsCall::all_gather() {
  copy(block(out_, me_, item_), whole(r_.input, item_), item_);
  const std::size_t step = piece_elements(1);
  const auto piece = [&](Rank r, std::size_t p) {
    const std::size_t of = out_.blocks[r], from = std::min(of, p * step);
    return slice(out_, begin_of(out_, r) + from, std::min(step, of - from), item_);
  };
  const std::size_t pieces = ceil_div(*std::ranges::max_element(out_.blocks), step);
  for (std::size_t p = 0; p < pieces; ++p) {
    exchange(
        p, [&](Rank r, std::size_t q) { return relay(r, host_) == me_ ? piece(r, q) : Spans{}; },
        [&](Rank r, std::size_t q) {
          return relay(me_, hosts_.of(r)) == r ? piece(me_, q) : Spans{};
        });
    Blocks all;
    for (const Rank here : hosts_.ranks(host_)) {
      Spans brought = piece(here, p);
      for (Rank r = 0; r < hosts_.world(); ++r)
        if (hosts_.of(r) != host_ && relay(r, host_) == here) append(brought, piece(r, p));
      all.add(brought);
    }
    run_here(Collective::all_gather, all, {}, true);
  }
}

// gather, scatter and all_to_all: every block goes from the rank that has it to the one that wants
// it.
void HostsCall::exchange_blocks() {
  const bool gathers = r_.collective == Collective::gather,
             scatters = r_.collective == Collective::scatter, is_root = me_ == r_.root;
  const auto block_for = [&](Rank to) {
    if (gathers) return to == r_.root ? whole(r_.input, item_) : Spans{};
    return scatters && !is_root ? Spans{} : block(r_.input, to, item_);
  };
  const auto block_from = [&](Rank from) {
    if (scatters) return from == r_.root ? whole(out_, item_) : Spans{};
    return gathers && !is_root ? Spans{} : block(out_, from, item_);
  };
  const std::vector<Rank> others = hosts_.meeting_order(me_);
  const std::size_t step = piece_elements(hosts_.world());
  const auto piece = [&](const Spans& of, std::size_t p) {
    const std::size_t all = elements(of), from = std::min(all, p * step);
    return slice({of, {}}, from, std::min(step, all - from), item_);
  };
  std::size_t largest = 0;
  for (const Rank r : others)
    largest = std::max({largest, elements(block_for(r)), elements(block_from(r))});
  for (std::size_t p = 0; p < ceil_div(largest, step); ++p)
    exchange(
        p, [&](Rank r, std::size_t q) { return piece(block_from(r), q); },
        [&](Rank r, std::size_t q) { return piece(block_for(r), q); });
  Blocks in, out;
  for (const Rank r : hosts_.ranks(host_)) {
    in.add(block_for(r));
    out.add(block_from(r));
  }
  run_here(Collective::all_to_all, in, out);
}

}  // namespace pycollect::ipc
