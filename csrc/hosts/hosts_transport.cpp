// See hosts_transport.h.
#include "hosts_transport.h"

#include <algorithm>
#include <cstring>

#include "../rank_executor/chunk_loop.h"

namespace pycollect::ipc {
namespace {

constexpr int kAgreement = 0;  // number of the messages of the agreement
static_assert(kAgreement < Wire::kFirstTransfer);
constexpr uint64_t kMagic = 0x70796873'00000002;  // changes with the format of a message
// A rank that waits for another host waits this much longer than the ranks of that host wait for
// each other, and the ranks of its own host wait for it twice as much longer. So the rank that
// times out first, and whose error all others throw, is one that waits for the missing rank itself.
constexpr std::chrono::milliseconds kGrace{500};

// How long a group that is destroyed after a rejected call stays, so that hosts that have not made
// the call yet learn why it fails.
constexpr std::chrono::seconds kRejectionTime{2};

OpContext with_grace(const OpContext& context, int times) {
  const auto grace = times * kGrace;
  return {context.operation, context.call,
          std::min(context.deadline, Deadline::max() - grace) + grace};
}

int number_of(const HostTransfer& transfer) { return Wire::kFirstTransfer + transfer.number; }

}  // namespace

struct HostsTransport::Header {
  uint64_t magic = kMagic, call = 0, fingerprint_hash = 0;
  MessageKind kind = MessageKind::fingerprint;
  uint32_t pieces = 0, as_many = 0, packs = 0, bytes = 0;  // `bytes`: of the data behind the header
  uint64_t piece = Agreement().piece;
  FingerprintDetails details = {};
};

HostsTransport::HostsTransport(Group& group, cpu::ParallelFor parallel_for, HostsLink link)
    : ShmTransport(group, std::move(parallel_for), link.hosts), link_(std::move(link)) {
  if (!leads()) return;
  const Hosts& hosts = *link_.hosts;
  inbox_.resize(hosts.count());
  outbox_.resize(hosts.count());
  owed_.resize(hosts.count());
  for (int h = 0; h < hosts.count(); ++h) {
    const std::size_t counts =
        2 * sizeof(uint64_t) * hosts.ranks(h).size() * hosts.ranks(host()).size();
    inbox_[h] = std::make_shared<std::vector<std::byte>>(sizeof(Header) +
                                                         std::max(kMessageBetweenHosts, counts));
    outbox_[h] = std::make_shared<std::vector<std::byte>>();
  }
}

HostsTransport::~HostsTransport() {
  try {
    link_.wire->await_sends(Clock::now() + kRejectionTime);
  } catch (const std::exception&) {
    // The other hosts will find the connections closed.
  }
}

void HostsTransport::begin(const CollectiveRequest& request, const OpContext& context) {
  context_ = with_grace(context, 1);
  local_context_ = with_grace(context, 2);
  ShmTransport::begin(request, context);
}

template <class F>
void HostsTransport::on_wire(const OpContext& context, Rank peer, const F& f) {
  link_.run(group(), context, peer, f);
}

void HostsTransport::send(const HostTransfer& transfer, const std::byte* at, std::size_t bytes) {
  on_wire(context_, transfer.peer, [&] {
    link_.wire->send(transfer.peer, number_of(transfer), at, bytes, context_.deadline);
  });
}

void HostsTransport::receive(const HostTransfer& transfer, std::byte* at, std::size_t bytes) {
  on_wire(context_, transfer.peer, [&] {
    link_.wire->receive(transfer.peer, number_of(transfer), at, bytes, context_.deadline);
  });
}

void HostsTransport::await_receive(const HostTransfer& transfer) {
  on_wire(context_, transfer.peer, [&] {
    link_.wire->await_receive(transfer.peer, number_of(transfer), context_.deadline);
  });
}

void HostsTransport::await_sends() { await_sends(context_); }

void HostsTransport::await_sends(const OpContext& context) {
  const Rank to = link_.wire->oldest_send().value_or(rank());
  on_wire(context, to, [&] { link_.wire->await_sends(context.deadline); });
}

Agreement HostsTransport::confirm(const CallFingerprint& mine, const Agreement& of_host,
                                  const OpContext& context, ChunkLoop* loop) {
  const HostsAgreement& agreed = group().hosts_agreement(mine.call);
  if (leads())
    lead(mine, of_host, with_grace(context, 1), loop);
  else
    group().await([&] { return agreed.calls.load(std::memory_order_acquire) == mine.call + 1; },
                  {.missing = [] { return std::vector<Rank>{0}; }}, with_grace(context, 2));
  const std::string why = read_text(agreed.why);
  if (!why.empty()) throw std::invalid_argument(why);
  if (loop != nullptr) use_context(local_context_);
  if (loop != nullptr && agreed.packed != 0) loop->skip_transfers();
  return {agreed.pieces, false, agreed.piece};
}

bool HostsTransport::all_publish_as_many(const CallFingerprint& mine) const {
  const HostsAgreement& agreed = group().hosts_agreement(mine.call);
  return agreed.calls.load(std::memory_order_acquire) == mine.call + 1 && agreed.as_many != 0;
}

// Waits for the messages of a call that this host has rejected.
void HostsTransport::settle(const OpContext& context) {
  for (int h = 0; h < hosts()->count(); ++h)
    if (owed_[h])
      on_wire(context, leader(h),
              [&] { link_.wire->await_receive(leader(h), kAgreement, context.deadline); });
  owed_.assign(owed_.size(), false);
  await_sends(context);
}

HostsTransport::Header HostsTransport::header(const CallFingerprint& mine, MessageKind kind) const {
  Header made;
  made.call = mine.call;
  made.fingerprint_hash = mine.fingerprint.fingerprint_hash;
  made.kind = kind;
  made.details = group().fingerprint_details(group().rank(), mine.call);
  return made;
}

// Starts a message to every other host, to which data may be appended.
void HostsTransport::post(const Header& header, const OpContext& context) {
  settle(context);
  for (int h = 0; h < hosts()->count(); ++h) {
    if (h == host()) continue;
    const auto* const from = reinterpret_cast<const std::byte*>(&header);
    outbox_[h]->assign(from, from + sizeof header);
    on_wire(context, leader(h), [&] {
      link_.wire->receive(leader(h), kAgreement, inbox_[h]->data(), inbox_[h]->size(),
                          context.deadline, inbox_[h]);
    });
    owed_[h] = true;
  }
}

void HostsTransport::append(int h, const void* data, std::size_t bytes) {
  const auto* const from = static_cast<const std::byte*>(data);
  outbox_[h]->insert(outbox_[h]->end(), from, from + bytes);
}

void HostsTransport::send_all(const OpContext& context) {
  for (int h = 0; h < hosts()->count(); ++h) {
    if (h == host()) continue;
    reinterpret_cast<Header*>(outbox_[h]->data())->bytes =
        static_cast<uint32_t>(outbox_[h]->size() - sizeof(Header));
    on_wire(context, leader(h), [&] {
      link_.wire->send(leader(h), kAgreement, outbox_[h]->data(), outbox_[h]->size(),
                       context.deadline, outbox_[h]);
    });
  }
}

const HostsTransport::Header& HostsTransport::received(int h) const {
  return *reinterpret_cast<const Header*>(inbox_[h]->data());
}
const std::byte* HostsTransport::data_of(int h) const { return inbox_[h]->data() + sizeof(Header); }

void HostsTransport::await_all(const CallFingerprint& mine, const OpContext& context) {
  for (int h = 0; h < hosts()->count(); ++h) {
    if (h == host()) continue;
    on_wire(context, leader(h),
            [&] { link_.wire->await_receive(leader(h), kAgreement, context.deadline); });
    owed_[h] = false;
    const Header& theirs = received(h);
    if (theirs.magic != kMagic || theirs.call != mine.call || theirs.piece == 0 ||
        theirs.bytes > inbox_[h]->size() - sizeof(Header))
      group().fail(
          AbortRecord::lost,
          text(link_.describe(leader(h)), " sent an invalid message; all hosts must run the ",
               "same version of pycollect"),
          context);
  }
}

// Returns in what the hosts' calls differ; empty if they do not.
std::string HostsTransport::compare(const CallFingerprint& mine) const {
  const int n = hosts()->count();
  bool alike = true;
  for (int h = 0; h < n; ++h) {
    if (h == host()) continue;
    if (received(h).kind == MessageKind::rejection)
      return {reinterpret_cast<const char*>(data_of(h)), received(h).bytes};
    alike &= received(h).fingerprint_hash == mine.fingerprint.fingerprint_hash;
  }
  if (alike) return {};
  std::vector<Fingerprint> fingerprints(n, mine.fingerprint);
  for (int h = 0; h < n; ++h)
    if (h != host()) fingerprints[h].fingerprint_hash = received(h).fingerprint_hash;
  const auto published = [&](int h) -> PublishedCall {
    return {fingerprints[h],
            h == host() ? group().fingerprint_details(0, mine.call) : received(h).details};
  };
  try {
    throw_mismatch(n, published, [&](int h) { return leader(h); });
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

// Appends, for each pair of a rank of this host and one of host `h`, how many elements it sends to
// and receives from that rank.
void HostsTransport::append_counts(const CallFingerprint& mine, int h) {
  for (const Rank here : hosts()->ranks(host())) {
    const ElementCounts counts = counts_of(group(), hosts()->index(here), mine.call);
    for (const Rank there : hosts()->ranks(h)) {
      const uint64_t both[] = {counts.sent[there], counts.received[there]};
      append(h, both, sizeof both);
    }
  }
}

std::string HostsTransport::compare_counts(const CallFingerprint& mine, int h) const {
  const std::byte* at = data_of(h);
  const std::size_t pairs = hosts()->ranks(h).size() * hosts()->ranks(host()).size();
  try {
    require(received(h).bytes == 2 * sizeof(uint64_t) * pairs, link_.describe(leader(h)),
            " sent counts of another number of ranks");
    for (const Rank there : hosts()->ranks(h))
      for (const Rank here : hosts()->ranks(host())) {
        uint64_t theirs[2];
        std::memcpy(theirs, at, sizeof theirs);
        at += sizeof theirs;
        const ElementCounts own = counts_of(group(), hosts()->index(here), mine.call);
        check_count(mine.collective, here, own.sent[there], there, theirs[1]);
        check_count(mine.collective, there, theirs[0], here, own.received[there]);
      }
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

// Only two hosts know the numbers of elements between them, so all tell each other the result.
std::string HostsTransport::agree_on_counts(const CallFingerprint& mine, const OpContext& context) {
  std::string why;
  for (int h = 0; h < hosts()->count() && why.empty(); ++h)
    if (h != host()) why = compare_counts(mine, h);
  post(header(mine, why.empty() ? MessageKind::verdict : MessageKind::rejection), context);
  for (int h = 0; h < hosts()->count(); ++h)
    if (h != host()) append(h, why.data(), why.size());
  send_all(context);
  await_all(mine, context);
  for (int h = 0; h < hosts()->count(); ++h) {
    if (h == host() ? why.empty() : received(h).kind != MessageKind::rejection) continue;
    if (h == host()) return why;
    return {reinterpret_cast<const char*>(data_of(h)), received(h).bytes};
  }
  return {};
}

// The calls agree, so a message of another size than the call needs comes from another program.
void HostsTransport::unpack(int h, const OpContext& context, ChunkLoop& loop) {
  try {
    loop.unpack(leader(h), data_of(h), received(h).bytes);
  } catch (const std::invalid_argument& error) {
    group().fail(AbortRecord::lost, error.what(), context);
  }
}

// Sets what follows from the headers of all hosts. A host with more regions has smaller ones, which
// limit the pieces of all; in an irregular call only the host itself knows its largest block.
void HostsTransport::combine(const Header& own, bool irregular, HostsAgreement& agreed) const {
  const auto header_of = [&](int h) -> const Header& { return h == host() ? own : received(h); };
  agreed.piece = own.piece;
  agreed.as_many = agreed.packed = 1;
  agreed.pieces = 1;
  for (int h = 0; h < hosts()->count(); ++h) {
    const Header& theirs = header_of(h);
    agreed.piece = std::min(agreed.piece, theirs.piece);
    agreed.packed &= theirs.packs;
    agreed.as_many &= theirs.as_many & (theirs.kind == MessageKind::fingerprint) &
                      (theirs.details.parts == own.details.parts);
  }
  for (int h = 0; h < hosts()->count(); ++h) {
    const Header& theirs = header_of(h);
    const bool larger = irregular && theirs.piece > agreed.piece;
    const uint64_t pieces =
        larger ? theirs.pieces * theirs.piece / agreed.piece + 1 : theirs.pieces;
    agreed.pieces = std::max(agreed.pieces, static_cast<uint32_t>(pieces));
  }
}

// Exchanges fingerprints with the other hosts, and publishes the result to the ranks of this one.
void HostsTransport::lead(const CallFingerprint& mine, const Agreement& of_host,
                          const OpContext& context, ChunkLoop* loop) {
  const bool packs = loop != nullptr && loop->packs();
  HostsAgreement& agreed = group().hosts_agreement(mine.call);
  const bool irregular = (mine.fingerprint.flags & Fingerprint::irregular) != 0;
  Header own = header(mine, MessageKind::fingerprint);
  own.pieces = of_host.pieces;
  own.piece = loop != nullptr ? loop->piece() : of_host.piece;
  own.packs = packs;
  own.as_many = ipc::all_publish_as_many(group(), mine);
  post(own, context);
  for (int h = 0; h < hosts()->count(); ++h) {
    if (h == host()) continue;
    if (packs) loop->pack(leader(h), *outbox_[h]);
    if (irregular) append_counts(mine, h);
  }
  send_all(context);
  await_all(mine, context);
  std::string why = compare(mine);
  combine(own, irregular, agreed);
  for (int h = 0; h < hosts()->count(); ++h)
    if (h != host() && agreed.packed != 0 && why.empty()) unpack(h, context, *loop);
  if (irregular && why.empty()) why = agree_on_counts(mine, context);
  agreed.why = {};
  why.resize(std::min(why.size(), agreed.why.size() - 1));
  std::copy(why.begin(), why.end(), agreed.why.begin());
  agreed.calls.store(mine.call + 1, std::memory_order_release);
}

// Does not wait for the other hosts: they may not have made the call yet.
void HostsTransport::reject(const CallFingerprint& mine, const OpContext& context,
                            std::string_view why) {
  if (!leads()) return;
  try {
    post(header(mine, MessageKind::rejection), with_grace(context, 1));
    why = why.substr(0, kMessageBetweenHosts);
    for (int h = 0; h < hosts()->count(); ++h)
      if (h != host()) append(h, why.data(), why.size());
    send_all(context);
  } catch (const CollectiveError&) {
    // The caller gets the reason for the rejection, and its next call that the group is aborted.
  }
}

}  // namespace pycollect::ipc
