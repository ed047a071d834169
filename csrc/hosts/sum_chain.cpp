// See sum_chain.h.
#include "sum_chain.h"

#include <bit>
#include <utility>

namespace pycollect::ipc {
namespace {

// Returns how many sums a fold of `ranks` ranks passes on.
std::size_t sums_of(int ranks, const CollectiveRequest& r) {
  const bool tree = r.options.order == FoldOrder::tree && order_matters(r.dtype, r.op);
  return tree ? std::popcount(static_cast<unsigned>(ranks)) : ranks > 0;
}

// A piece is a message: it must be so large that the work for a message is little beside the time
// that its bytes take. A chain of more hosts needs more of them.
constexpr std::size_t kPieceBytes = 256 * 1024, kMostPieceBytes = 512 * 1024;
constexpr std::size_t kPiecesPerHost = 8;
// The ranks of a host expose a group of pieces at a time, and wait for each other each time. A rank
// writes to one half of its exposed memory while others may still read the other half.
constexpr std::size_t kPiecesOfGroup = 2, kHalfBytes = HostsExecutor::kExposedBytes / 2;
// Every part gives a group at least so much, unless there are many parts, so that small blocks need
// few messages.
constexpr std::size_t kLeastShareBytes = 16 * 1024;
constexpr std::size_t kLine = 64;

}  // namespace

SumChain::SumChain(HostsCall& call)
    : call_(call),
      executor_(call.executor_),
      r_(call.r_),
      hosts_(call.hosts_),
      host_(call.host_),
      last_(hosts_.count() - 1),
      ranks_(static_cast<int>(hosts_.ranks(host_).size())),
      returns_(r_.collective == Collective::all_reduce),
      wide_(call.row_.accumulator_item()),
      before_(hosts_.ranks(host_)[0]),
      sums_in_(sums_of(before_, r_)),
      sums_out_(sums_of(before_ + ranks_, r_)) {
  cut();
}

// Cuts the data into the rails' parts, these into groups, and each rail's share of a group into
// pieces.
void SumChain::cut() {
  const int rails = hosts_.rails();
  const std::size_t all = total(r_.input);
  std::size_t begin = 0;
  if (r_.collective == Collective::reduce_scatter)
    for (Rank to = 0; to < hosts_.world(); begin += parts_.back().count, ++to)
      parts_.push_back({begin, r_.input.blocks[to], hosts_.index(to) % rails, to});
  else
    for (int rail = 0; rail < rails; begin += parts_.back().count, ++rail)
      parts_.push_back({begin, std::min(in_lines(all, rails), all - begin), rail, r_.root});
  require(parts_.size() <= kHalfBytes / 2 / kLine, name(r_.collective), " over several hosts has ",
          "at most ", kHalfBytes / 2 / kLine, " ranks, not ", parts_.size());
  place_rails(1);
  if (half_ == 0) return;
  const std::size_t bytes = of_rail_ * call_.item_;
  const std::size_t pieces =
      std::max(std::clamp<std::size_t>(bytes / kPieceBytes, 1, kPiecesPerHost * hosts_.count()),
               ceil_div(bytes, kMostPieceBytes));
  std::size_t groups = ceil_div(pieces, kPiecesOfGroup);
  for (place_rails(groups); half_ > kHalfBytes; place_rails(groups)) groups += groups / 4 + 1;
  for (const Part& part : parts_) groups_ = std::max(groups_, ceil_div(part.count, part.share));
  of_piece_ = in_lines(of_rail_, ceil_div(pieces, groups_));
  per_group_ = ceil_div(of_rail_, of_piece_);
  pieces_ = groups_ * per_group_;
}

std::size_t SumChain::in_lines(std::size_t count, std::size_t into) const {
  const std::size_t of_line = kLine / call_.item_;
  return ceil_div(ceil_div(count, into), of_line) * of_line;
}

// Cuts the parts for so many groups or fewer, and divides a half among the rails. No group is
// larger than the first.
void SumChain::place_rails(std::size_t groups) {
  const std::size_t least = std::min(kHalfBytes / 2 / parts_.size(), kLeastShareBytes);
  for (Part& part : parts_)
    part.share = std::max(in_lines(part.count, groups), in_lines(least / call_.item_, 1));
  of_rail_ = half_ = 0;
  rail_begins_.clear();
  for (int rail = 0; rail < hosts_.rails(); ++rail) {
    const std::size_t n = rail_count(0, rail);
    of_rail_ = std::max(of_rail_, n);
    rail_begins_.push_back(half_);
    half_ += in_lines(n, 1) * call_.item_;
  }
}

std::size_t SumChain::count_of(const Part& part, std::size_t group) const {
  const std::size_t from = group * part.share;
  return from >= part.count ? 0 : std::min(part.share, part.count - from);
}

std::size_t SumChain::rail_count(std::size_t group, int rail) const {
  std::size_t n = 0;
  for (const Part& part : parts_)
    if (part.rail == rail) n += count_of(part, group);
  return n;
}

std::size_t SumChain::piece_count(std::size_t piece) const {
  const std::size_t n = rail_count(piece / per_group_, call_.index_);
  const std::size_t from = piece % per_group_ * of_piece_;
  return from >= n ? 0 : std::min(of_piece_, n - from);
}

Spans SumChain::of_rail(const CallBuffer& buffer, std::size_t group, int rail) const {
  Spans data;
  for (const Part& part : parts_)
    if (part.rail == rail)
      append(data,
             slice(buffer, part.begin + group * part.share, count_of(part, group), call_.item_));
  return data;
}

// Where this rank wants a part of a reduce or reduce_scatter.
Spans SumChain::wanted(const Part& part, std::size_t group) const {
  const std::size_t skip = r_.collective == Collective::reduce ? part.begin : 0;
  return slice(call_.out_, skip + group * part.share, count_of(part, group), call_.item_);
}

// A host adds up kAhead more pieces, for every hop between, before it awaits the result of one.
void SumChain::run() {
  const std::size_t lag = returns_ ? kAhead * 2 * (last_ - host_) : 0;
  kept_groups_ = ceil_div(kPosted, per_group_) + 2;
  results_sent_.resize(kept_groups_ * per_group_);
  result_receives_.resize(kept_groups_ * per_group_);
  data_.resize(ranks_);
  const std::size_t carries = std::min(pieces_, kCarries) * of_piece_ * wide_ *
                              std::max(sums_in_, sums_out_),
                    results = kept_groups_ * of_rail_ * call_.item_;
  memory_ = executor_.scratch(carries + results);
  carries_ = memory_.get();
  results_ = carries_ + carries;
  for (std::size_t p = 0; p < kPosted; ++p) {
    post_carry(p);
    post_results(p);
  }
  for (std::size_t time = 0; time < pieces_ + lag; ++time) {
    if (time < pieces_) add(time);
    if (time >= lag) pass_on(time - lag);
  }
  call_.finish();
}

void SumChain::send(Rank to, const std::byte* at, std::size_t bytes, std::size_t& sent) {
  executor_.send(to, at, bytes, memory_);
  sent = ++sends_;
}

void SumChain::post_carry(std::size_t p) {
  if (p >= pieces_ || host_ == 0 || piece_count(p) == 0) return;
  await_sent(carry_sent(p));
  carry_receive(p) =
      executor_.receive(rail_on(host_ - 1), carry(p), piece_count(p) * wide_ * sums_in_, memory_);
}

// Begins to receive what comes back of a piece: of an all_reduce, from the next host.
void SumChain::post_results(std::size_t p) {
  if (p >= pieces_ || host_ == last_) return;
  const std::size_t group = p / per_group_;
  if (!returns_ && p % per_group_ == 0)
    for (const Part& part : parts_)
      if (part.to == call_.me_) call_.post(call_.rank_on(last_, part.rail), wanted(part, group));
  if (!returns_ || piece_count(p) == 0) return;
  await_sent(results_sent(p));
  result_receive(p) =
      executor_.receive(rail_on(host_ + 1), result(p), piece_count(p) * call_.item_, memory_);
}

// Exposes this rank's data of a group, and finds that of this host's ranks for this rail. This
// rank's own stays where it is if it is in one place. A rank that waits here for the next group has
// added up this one, so its half serves the next but one.
void SumChain::expose_data(std::size_t group) {
  const std::size_t half = group % 2 * half_, own = call_.index_;
  std::byte* const to = executor_.exposed(call_.index_) + half;
  Spans in_place;
  for (std::size_t rail = 0; rail < rail_begins_.size(); ++rail) {
    const Spans data = of_rail(r_.input, group, static_cast<int>(rail));
    if (data.empty()) continue;
    if (rail == own && data.size() == 1) {
      in_place = data;
      continue;
    }
    executor_.commit_exposed(2 * half_);
    copy({{to + rail_begins_[rail], elements(data)}}, data, call_.item_);
  }
  executor_.run_here({.collective = Collective::barrier, .tensors = 0});
  if (own >= rail_begins_.size()) return;  // no rail
  for (int i = 0; i < ranks_; ++i) data_[i] = executor_.exposed(i) + half + rail_begins_[own];
  if (!in_place.empty()) data_[own] = in_place[0].base;
}

// Adds this host's data to a piece.
void SumChain::add(std::size_t p) {
  const std::size_t group = p / per_group_, item = call_.item_;
  if (p % per_group_ == 0) expose_data(group);
  if (const std::size_t n = piece_count(p); n > 0) {
    const bool ends = host_ == last_;
    if (host_ == 0) await_sent(carry_sent(p));
    if (ends) await_sent(results_sent(p));
    if (host_ > 0) executor_.await(carry_receive(p));
    std::vector<void*> from, to;
    for (std::size_t sum = 0; sum < sums_in_; ++sum) from.push_back(carry(p) + sum * n * wide_);
    for (std::byte* const all_of : data_)
      from.push_back(all_of + p % per_group_ * of_piece_ * item);
    for (std::size_t sum = 0; sum < sums_out_ && !ends; ++sum)
      to.push_back(carry(p) + sum * n * wide_);
    if (ends) to.push_back(result(p));
    call_.row_.run_accumulators(ends, {to.data(), static_cast<int>(to.size())}, !ends,
                                {from.data(), static_cast<int>(from.size())},
                                static_cast<int>(sums_in_), before_, n);
    if (!ends) send(rail_on(host_ + 1), carry(p), n * wide_ * sums_out_, carry_sent(p));
    if (ends && returns_) send(rail_on(host_ - 1), result(p), n * item, results_sent(p));
  }
  post_carry(p + kPosted);
}

void SumChain::pass_on(std::size_t p) {
  const std::size_t n = piece_count(p), group = p / per_group_;
  if (returns_ && host_ < last_ && n > 0) {
    executor_.await(result_receive(p));
    if (host_ > 0) send(rail_on(host_ - 1), result(p), n * call_.item_, results_sent(p));
  }
  post_results(p + kPosted);
  if ((p + 1) % per_group_ != 0) return;
  if (returns_) return hand_out(group);
  if (host_ == last_) return deliver(group);
  const std::size_t behind = ceil_div(kBehind, per_group_);
  if (group < behind) return;
  const auto arrives = [&](const Part& part) {
    return part.to == call_.me_ && count_of(part, group - behind) > 0;
  };
  call_.finish(call_.arrivals_.size() - std::ranges::count_if(parts_, arrives));
}

void SumChain::hand_out(std::size_t group) {
  HostsCall::Blocks own, all;
  own.add({{results(group), rail_count(group, call_.index_)}});
  for (int i = 0; i < ranks_; ++i) all.add(of_rail(call_.out_, group, i));
  call_.run_here(Collective::all_gather, own, all);
}

// The last host's ranks of the rails send a group of a reduce or reduce_scatter to the ranks that
// want it.
void SumChain::deliver(std::size_t group) {
  std::byte* at = results(group);
  std::size_t sent = 0;
  HostsCall::Blocks in, out;
  std::vector<Spans> for_here(ranks_), from_here(ranks_);
  for (const Part& part : parts_) {
    if (part.rail == call_.index_) {
      const std::size_t n = count_of(part, group);
      const Spans sum{{std::exchange(at, at + n * call_.item_), n}};
      if (hosts_.of(part.to) == host_)
        append(for_here[hosts_.index(part.to)], sum);
      else if (n > 0)
        send(part.to, sum[0].base, n * call_.item_, sent);
    }
    if (part.to == call_.me_) append(from_here[part.rail], wanted(part, group));
  }
  for (std::size_t i = 0; i < per_group_; ++i) results_sent(group * per_group_ + i) = sent;
  for (int i = 0; i < ranks_; ++i) {
    in.add(for_here[i]);
    out.add(from_here[i]);
  }
  call_.run_here(Collective::all_to_all, in, out);
}

}  // namespace pycollect::ipc
