// See hosts_executor.h.
#include "hosts_executor.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "hosts_call.h"
#include "spans.h"

namespace pycollect::ipc {
namespace {

constexpr uint64_t kMagic = 0x70796873'00000003;  // changes with the format of a message
// Most data of a host that goes along with the agreement.
constexpr std::size_t kMostAlong = 32 * 1024;
// A rank that waits for another host waits this much longer than the ranks of that host wait for
// each other, and the ranks of its own host wait for it twice as much longer. So the rank that
// times out first, and whose error all others throw, is one that waits for the missing rank itself.
constexpr std::chrono::milliseconds kGrace{500};
// How long a group that is destroyed waits until other hosts have its last fingerprints: they may
// not have made the call yet, and learn from these why it fails.
constexpr std::chrono::seconds kLastTime{2};

Deadline with_grace(Deadline deadline, int times) {
  const auto grace = times * kGrace;
  return std::min(deadline, Deadline::max() - grace) + grace;
}

}  // namespace

// What one rank is going to do, for the ranks of all hosts.
struct HostsExecutor::Card {
  uint64_t magic = kMagic;
  Fingerprint fingerprint = {};
  FingerprintDetails details = {};
};

// What the first rank of a host tells the others of it.
struct HostsExecutor::Verdict {
  uint32_t as_many = 0;            // 1: all ranks make equally many requests, and none refuses
  std::array<char, 508> why = {};  // in what the ranks' calls differ; empty: they agree
};

// The data that goes along with the cards: `bytes` of every rank's input, or of one rank's.
struct HostsExecutor::Along {
  std::size_t bytes = 0;  // 0: none
  Rank only = kAll;
  static constexpr Rank kAll = -1;
  bool has(Rank r) const { return bytes > 0 && (only == kAll || only == r); }
  std::size_t total(int world) const { return only == kAll ? world * bytes : bytes; }
  std::size_t place(Rank r) const { return only == kAll ? r * bytes : 0; }
};

HostsExecutor::HostsExecutor(Group& group, const cpu::ParallelFor& parallel_for,
                             std::shared_ptr<HostChannel> channel)
    : group_(group),
      channel_(std::move(channel)),
      me_(group.world_rank(group.rank())),
      host_(hosts().of(me_)),
      here_(group, parallel_for),
      cards_(hosts().count()) {
  const std::size_t counts = 2 * sizeof(uint64_t) * hosts().world();
  for (int h = 0; h < hosts().count(); ++h) {
    if (h != host_ && !is_first()) continue;
    cards_[h].bytes = hosts().ranks(h).size() * (sizeof(Card) + counts) + kMostAlong;
    const std::shared_ptr<Card[]> cards(new Card[cards_[h].bytes / sizeof(Card) + 1]);  // aligned
    cards_[h].at = {cards, reinterpret_cast<std::byte*>(cards.get())};
  }
}

HostsExecutor::~HostsExecutor() {
  try {
    const Deadline soon = Clock::now() + kLastTime;
    for (const HostTransferPtr& send : sends_) channel_->await(send, soon);
  } catch (const std::exception&) {
    // The other hosts will find the connections closed.
  }
}

// --- transfers

void HostsExecutor::send(Rank to, int number, const std::byte* at, std::size_t bytes,
                         MemoryOwner owner) {
  sends_.push_back(channel_->run(group_, channel_context_, to, [&] {
    return channel_->send(to, number, at, bytes, std::move(owner));
  }));
}

HostTransferPtr HostsExecutor::receive(Rank from, int number, std::byte* at, std::size_t bytes,
                                       MemoryOwner owner) {
  return channel_->run(group_, channel_context_, from, [&] {
    return channel_->receive(from, number, at, bytes, std::move(owner));
  });
}

void HostsExecutor::await(const HostTransferPtr& transfer) {
  channel_->run(group_, channel_context_, transfer->peer,
                [&] { channel_->await(transfer, channel_context_.deadline); });
}

void HostsExecutor::await_sends(std::size_t most_left) {
  while (sends_.size() > most_left) {
    const HostTransferPtr oldest = std::move(sends_.front());
    sends_.pop_front();  // one that has failed is not awaited again
    await(oldest);
  }
}

std::shared_ptr<std::byte[]> HostsExecutor::scratch(std::size_t bytes) {
  if (bytes > scratch_bytes_) scratch_.reset(new std::byte[bytes]);  // not cleared
  scratch_bytes_ = std::max(scratch_bytes_, bytes);
  return scratch_;
}

void HostsExecutor::commit_exposed(std::size_t bytes) {
  if (bytes <= exposed_bytes_) return;
  bytes = std::min(std::bit_ceil(bytes), kExposedBytes);  // calls of growing size commit rarely
  group_.segment()->commit(group_.layout().exposed(group_.rank()) + exposed_bytes_,
                           bytes - exposed_bytes_);
  exposed_bytes_ = bytes;
}

void HostsExecutor::run_here(CollectiveRequest request) {
  request.part_of = {user_collective_, channel_context_.call};
  here_.run(request, calls_here_++, here_context_.deadline);
}

// --- calls

// Runs `f`, and ends the group if it fails, for other hosts at once: a rank there that makes the
// call later would find what this rank has sent, and finish the call alone.
template <class F>
auto HostsExecutor::or_close(const OpContext& context, const F& f) {
  try {
    return abort_on_error(group_, context, f);
  } catch (...) {
    if (!group_.is_healthy()) channel_->close(group_.abort_cause());
    throw;
  }
}

void HostsExecutor::begin(Collective user_collective, uint64_t call, Deadline deadline) {
  user_collective_ = user_collective;
  answer_.assign(sizeof(Verdict), {});
  here_context_ = {name(user_collective), call, deadline};
  channel_context_ = {name(user_collective), call, with_grace(deadline, 1)};
  group_.begin_call(here_context_);
}

void HostsExecutor::end() { group_.end_call(channel_context_.call + 1, group_.run_number()); }

void HostsExecutor::run(const CollectiveRequest& request, uint64_t call, Deadline deadline) {
  try {
    check(request);
  } catch (const std::exception& error) {
    refuse(request.user_collective(), call, deadline,
           text(name(request.user_collective()), ": ", error.what()));
    throw;
  }
  begin(request.user_collective(), call, deadline);
  const CallFingerprint fingerprint = fingerprint_of(request, call);
  Card mine{.fingerprint = fingerprint.fingerprint};
  describe(mine.details, fingerprint);
  const Along along = exchange(mine, &request);
  if (request.tensors == 0) return end();
  or_close(here_context_, [&] {
    if (along.bytes > 0)
      run_small(request, along);
    else
      HostsCall(*this, request).run();
  });
  end();
}

void HostsExecutor::agree(const CollectiveRequest& request, const CallFingerprint& fingerprint,
                          Deadline deadline) {
  begin(request.user_collective(), fingerprint.description.call, deadline);
  Card mine{.fingerprint = fingerprint.fingerprint};
  describe(mine.details, fingerprint);
  CollectiveRequest without_data = request;
  without_data.tensors = 0;
  exchange(mine, &without_data);
  end();
}

bool HostsExecutor::all_publish_as_many(const CallFingerprint&) const {
  return reinterpret_cast<const Verdict*>(answer_.data())->as_many != 0;
}

void HostsExecutor::refuse(Collective collective, uint64_t call, Deadline deadline,
                           std::string_view why) {
  begin(collective, call, deadline);
  const CallFingerprint refusal = refusal_of(collective, call);
  Card mine{.fingerprint = refusal.fingerprint};
  describe(mine.details, refusal);
  describe_refusal(mine.details, why);
  try {
    exchange(mine, nullptr);
  } catch (const std::invalid_argument&) {
    // What all ranks throw because of a refusal. The caller throws the reason.
  }
}

void HostsExecutor::check(const CollectiveRequest& request) {
  if (request.tensors == 0) return;
  require(request.algorithm.empty(), "algorithm='", request.algorithm,
          "' is for ranks on one host; ",
          "ranks on several hosts have one way for each collective, so leave the option out");
  require(!request.in_place || request.input.blocks.size() <= 1, name(request.collective),
          " over several hosts does not run in place; give it an output of its own");
  check_request(request, {me_, hosts().world()});
}

// --- the agreement

HostsExecutor::Along HostsExecutor::exchange(const Card& mine, const CollectiveRequest* request) {
  // A rank that fails here alone would leave those of other hosts waiting.
  const Along along = or_close(channel_context_, [&] { return exchange_cards(mine, request); });
  const auto& verdict = *reinterpret_cast<const Verdict*>(answer_.data());
  if (verdict.why[0] != '\0') throw std::invalid_argument(verdict.why.data());
  return along;
}

HostsExecutor::Along HostsExecutor::exchange_cards(const Card& mine,
                                                   const CollectiveRequest* request) {
  const std::vector<Rank>& here = hosts().ranks(host_);
  if (is_first()) await_sends();  // of the cards of the last call
  const std::size_t bytes = sizeof mine, all = here.size() * bytes;
  const BufferSpan own{reinterpret_cast<std::byte*>(const_cast<Card*>(&mine)), bytes},
      cards{cards_[host_].at.get(), all};
  const Sizes blocks(here.size(), bytes);
  run_here({.collective = Collective::all_gather,
            .input = {{&own, 1}, {&bytes, 1}},
            .output = {{&cards, 1}, blocks}});
  const uint64_t hash = mine.fingerprint.fingerprint_hash;
  const bool agrees = request != nullptr && std::ranges::all_of(here, [&](Rank r) {
                        return is_same(card_of(r).fingerprint, hash);
                      });
  const Along along = agrees ? along_of(*request) : Along{};
  if (agrees && request->irregular)
    gather_counts(*request);
  else if (std::ranges::any_of(here, [&](Rank r) { return along.has(r); }))
    gather_data(*request, along.bytes);
  answer_.resize(sizeof(Verdict) + along.total(hosts().world()));
  if (is_first()) exchange_between_hosts(agrees ? request : nullptr, along);
  here_context_.deadline = with_grace(here_context_.deadline, 2);
  const std::size_t answered = answer_.size();
  const BufferSpan answer{answer_.data(), answered};
  run_here({.collective = Collective::broadcast,
            .in_place = true,
            .input = {{&answer, 1}, {&answered, 1}}});
  return along;
}

// Returns what goes along of a request, on which the ranks of this host agree.
HostsExecutor::Along HostsExecutor::along_of(const CollectiveRequest& r) const {
  const bool only_of_root =
      r.collective == Collective::gather || r.collective == Collective::scatter;
  if (r.irregular || r.tensors == 0 || r.collective == Collective::barrier || only_of_root)
    return {};
  Along along;
  const CallBuffer& known = r.input.blocks.empty() ? r.output : r.input;
  std::size_t most = total(known);
  if (r.collective == Collective::broadcast) along.only = r.root;
  if (r.collective == Collective::all_gather) most = *std::ranges::max_element(r.output.blocks);
  std::size_t ranks = 1;
  for (int h = 0; h < hosts().count(); ++h) ranks = std::max(ranks, hosts().ranks(h).size());
  along.bytes = most * item_bytes(r.dtype);
  return along.bytes * ranks <= kMostAlong ? along : Along{};
}

const HostsExecutor::Card& HostsExecutor::card_of(Rank r) const {
  return reinterpret_cast<const Card*>(cards_[hosts().of(r)].at.get())[hosts().index(r)];
}

// Returns what a rank has sent behind the cards of its host, if each rank has sent `bytes`.
std::byte* HostsExecutor::behind_cards(Rank r, std::size_t bytes) {
  const int host = hosts().of(r);
  return cards_[host].at.get() + hosts().ranks(host).size() * sizeof(Card) +
         hosts().index(r) * bytes;
}

void HostsExecutor::gather_behind_cards(std::byte* at, std::size_t bytes) {
  const std::size_t here = hosts().ranks(host_).size();
  const BufferSpan own{at, bytes}, all{behind_cards(first_rank(host_), 0), here * bytes};
  const Sizes blocks(here, bytes);
  run_here({.collective = Collective::gather,
            .input = {{&own, 1}, {&bytes, 1}},
            .output = is_first() ? CallBuffer{{&all, 1}, blocks} : CallBuffer{}});
}

void HostsExecutor::gather_counts(const CollectiveRequest& request) {
  const int world = hosts().world();
  std::vector<uint64_t> counts(2 * world);
  write_counts({counts.data(), counts.data() + world}, request, world);
  gather_behind_cards(reinterpret_cast<std::byte*>(counts.data()),
                      counts.size() * sizeof(uint64_t));
}

void HostsExecutor::gather_data(const CollectiveRequest& request, std::size_t bytes) {
  std::vector<std::byte> data(bytes);
  const std::size_t item = item_bytes(request.dtype);
  copy({{data.data(), bytes / item}}, whole(request.input, item), item);
  gather_behind_cards(data.data(), bytes);
}

void HostsExecutor::exchange_between_hosts(const CollectiveRequest* request, const Along& along) {
  const std::vector<Rank>& here = hosts().ranks(host_);
  std::size_t behind = 0;  // bytes of a rank
  if (request != nullptr && request->irregular)
    behind = 2 * sizeof(uint64_t) * hosts().world();
  else if (std::ranges::any_of(here, [&](Rank r) { return along.has(r); }))
    behind = along.bytes;
  const std::size_t bytes = here.size() * (sizeof(Card) + behind);
  std::vector<HostTransferPtr> receives(hosts().count());
  for (int h = 0; h < hosts().count(); ++h)
    if (h != host_)
      receives[h] =
          receive(first_rank(h), kAgreement, cards_[h].at.get(), cards_[h].bytes, cards_[h].at);
  for (int h = 0; h < hosts().count(); ++h)
    if (h != host_)
      send(first_rank(h), kAgreement, cards_[host_].at.get(), bytes, cards_[host_].at);
  for (int h = 0; h < hosts().count(); ++h) {
    if (h == host_) continue;
    await(receives[h]);
    const Card& theirs = card_of(first_rank(h));
    if (theirs.magic != kMagic || theirs.details.call != channel_context_.call)
      group_.fail(
          AbortRecord::lost,
          text(channel_->describe(first_rank(h)), " sent an invalid message; all hosts must run ",
               "the same version of pycollect"),
          channel_context_);
  }
  Verdict verdict;
  compare(verdict, request);
  std::memcpy(answer_.data(), &verdict, sizeof verdict);
  for (Rank r = 0; r < hosts().world(); ++r)
    if (along.has(r))
      std::memcpy(answer_.data() + sizeof verdict + along.place(r), behind_cards(r, along.bytes),
                  along.bytes);
}

void HostsExecutor::compare(Verdict& verdict, const CollectiveRequest* request) const {
  const int world = hosts().world();
  const Card& first = card_of(0);
  bool agrees = true, as_many = true;
  for (Rank r = 0; r < world; ++r) {
    agrees &= is_same(card_of(r).fingerprint, first.fingerprint.fingerprint_hash);
    as_many &= (card_of(r).fingerprint.flags & Fingerprint::refused) == 0 &&
               card_of(r).details.parts == first.details.parts;
  }
  verdict.as_many = as_many;
  const auto published = [&](Rank r) -> PublishedCall {
    auto* const sent = reinterpret_cast<uint64_t*>(
        const_cast<HostsExecutor*>(this)->behind_cards(r, 2 * sizeof(uint64_t) * world));
    return {card_of(r).fingerprint, card_of(r).details, {sent, sent + world}};
  };
  try {
    if (!agrees) throw_mismatch(world, published);
    if (request->irregular) check_counts(request->collective, world, published);
  } catch (const std::invalid_argument& error) {
    const std::string_view why = error.what();
    why.copy(verdict.why.data(), verdict.why.size() - 1);
  }
}

// --- calls whose data came along

void HostsExecutor::run_small(const CollectiveRequest& r, const Along& along) {
  const int world = hosts().world();
  const std::size_t item = item_bytes(r.dtype);
  const CallBuffer& out = r.in_place ? r.input : r.output;
  const auto data = [&](Rank from, std::size_t begin, std::size_t count) -> BufferSpan {
    return {answer_.data() + sizeof(Verdict) + along.place(from) + begin * item, count};
  };
  if (r.collective == Collective::broadcast)
    return copy(whole(out, item), {data(r.root, 0, total(out))}, item);
  if (r.collective == Collective::all_gather || r.collective == Collective::all_to_all) {
    const bool gathers = r.collective == Collective::all_gather;
    for (Rank from = 0; from < world; ++from)
      copy(block(out, from, item),
           {data(from, gathers ? 0 : begin_of(r.input, me_), out.blocks[from])}, item);
    return;
  }
  if (r.collective == Collective::reduce && r.root != me_) return;
  const bool scatters = r.collective == Collective::reduce_scatter;
  const std::size_t begin = scatters ? begin_of(r.input, me_) : 0;
  const std::size_t count = scatters ? r.input.blocks[me_] : total(r.input);
  std::vector<void*> from;
  for (Rank k = 0; k < world; ++k) from.push_back(data(k, begin, count).base);
  const auto result = scratch(count * item);
  void* const to = result.get();
  const cpu::RowRunner row(r.dtype, r.op, of_world(r.options, world));
  row.run(true, {&to, 1}, {from.data(), world}, count, false);
  copy(whole(out, item), {{static_cast<std::byte*>(to), count}}, item);
}

}  // namespace pycollect::ipc
