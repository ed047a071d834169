// See hosts_exchange.h.
#include "hosts_exchange.h"

#include <algorithm>
#include <cstring>

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

struct HostsExchange::Header {
  uint64_t magic = kMagic, call = 0, fingerprint_hash = 0;
  MessageKind kind = MessageKind::fingerprint;
  uint32_t pieces = 0, as_many = 0, packs = 0, bytes = 0;  // `bytes`: of the data behind the header
  uint64_t piece = Pieces().elements;
  FingerprintDetails details = {};
};

HostsExchange::HostsExchange(Group& group, HostsLink link) : group_(group), link_(std::move(link)) {
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

HostsExchange::~HostsExchange() {
  try {
    link_.wire->await_sends(Clock::now() + kRejectionTime);
  } catch (const std::exception&) {
    // The other hosts will find the connections closed.
  }
}

void HostsExchange::begin(const OpContext& context) {
  context_ = with_grace(context, 1);
  local_context_ = with_grace(context, 2);
}

template <class F>
void HostsExchange::on_wire(const OpContext& context, Rank peer, const F& f) {
  link_.run(group_, context, peer, f);
}

void HostsExchange::send(const HostTransfer& transfer, const std::byte* at, std::size_t bytes) {
  on_wire(context_, transfer.peer, [&] {
    link_.wire->send(transfer.peer, number_of(transfer), at, bytes, context_.deadline);
  });
}

void HostsExchange::receive(const HostTransfer& transfer, std::byte* at, std::size_t bytes) {
  on_wire(context_, transfer.peer, [&] {
    link_.wire->receive(transfer.peer, number_of(transfer), at, bytes, context_.deadline);
  });
}

void HostsExchange::await_receive(const HostTransfer& transfer) {
  on_wire(context_, transfer.peer, [&] {
    link_.wire->await_receive(transfer.peer, number_of(transfer), context_.deadline);
  });
}

void HostsExchange::await_sends() { await_sends(context_); }

void HostsExchange::await_sends(const OpContext& context) {
  const Rank to = link_.wire->oldest_send().value_or(group_.world_rank(group_.rank()));
  on_wire(context, to, [&] { link_.wire->await_sends(context.deadline); });
}

Agreement HostsExchange::confirm(const CallFingerprint& mine, const Agreement& of_host,
                                 const OpContext& context, ProgramRun* data) {
  const HostsAgreement& agreed = group_.hosts_agreement(mine.description.call);
  if (leads())
    lead(mine, of_host, with_grace(context, 1), data);
  else
    group_.await(
        [&] { return agreed.calls.load(std::memory_order_acquire) == mine.description.call + 1; },
        {.missing = [] { return std::vector<Rank>{0}; }}, with_grace(context, 2));
  const std::string why = read_text(agreed.why);
  if (!why.empty()) throw std::invalid_argument(why);
  if (data != nullptr && agreed.packed != 0) data->skip_transfers();
  return {{agreed.pieces, agreed.piece}, false};
}

bool HostsExchange::all_publish_as_many(const CallFingerprint& mine) const {
  const HostsAgreement& agreed = group_.hosts_agreement(mine.description.call);
  return agreed.calls.load(std::memory_order_acquire) == mine.description.call + 1 &&
         agreed.as_many != 0;
}

// Waits for the messages of a call that this host has rejected.
void HostsExchange::settle(const OpContext& context) {
  for (int h = 0; h < hosts()->count(); ++h)
    if (owed_[h])
      on_wire(context, leader(h),
              [&] { link_.wire->await_receive(leader(h), kAgreement, context.deadline); });
  owed_.assign(owed_.size(), false);
  await_sends(context);
}

HostsExchange::Header HostsExchange::header(const CallFingerprint& mine, MessageKind kind) const {
  Header made;
  made.call = mine.description.call;
  made.fingerprint_hash = mine.fingerprint.fingerprint_hash;
  made.kind = kind;
  made.details = group_.fingerprint_details(group_.rank(), mine.description.call);
  return made;
}

// Starts a message to every other host, to which data may be appended.
void HostsExchange::post(const Header& header, const OpContext& context) {
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

void HostsExchange::append(int h, const void* data, std::size_t bytes) {
  const auto* const from = static_cast<const std::byte*>(data);
  outbox_[h]->insert(outbox_[h]->end(), from, from + bytes);
}

void HostsExchange::send_all(const OpContext& context) {
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

const HostsExchange::Header& HostsExchange::received(int h) const {
  return *reinterpret_cast<const Header*>(inbox_[h]->data());
}
const std::byte* HostsExchange::data_of(int h) const { return inbox_[h]->data() + sizeof(Header); }

void HostsExchange::await_all(const CallFingerprint& mine, const OpContext& context) {
  for (int h = 0; h < hosts()->count(); ++h) {
    if (h == host()) continue;
    on_wire(context, leader(h),
            [&] { link_.wire->await_receive(leader(h), kAgreement, context.deadline); });
    owed_[h] = false;
    const Header& theirs = received(h);
    if (theirs.magic != kMagic || theirs.call != mine.description.call || theirs.piece == 0 ||
        theirs.bytes > inbox_[h]->size() - sizeof(Header))
      group_.fail(
          AbortRecord::lost,
          text(link_.describe(leader(h)), " sent an invalid message; all hosts must run the ",
               "same version of pycollect"),
          context);
  }
}

// Returns in what the hosts' calls differ; empty if they do not.
std::string HostsExchange::compare(const CallFingerprint& mine) const {
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
    return {fingerprints[h], h == host() ? group_.fingerprint_details(0, mine.description.call)
                                         : received(h).details};
  };
  try {
    throw_mismatch(n, published, [&](int h) { return leader(h); });
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

// Appends, for each pair of a rank of this host and one of host `h`, how many elements it sends to
// and receives from that rank.
void HostsExchange::append_counts(const CallFingerprint& mine, int h) {
  for (const Rank here : hosts()->ranks(host())) {
    const ElementCounts counts = counts_of(group_, hosts()->index(here), mine.description.call);
    for (const Rank there : hosts()->ranks(h)) {
      const uint64_t both[] = {counts.sent[there], counts.received[there]};
      append(h, both, sizeof both);
    }
  }
}

std::string HostsExchange::compare_counts(const CallFingerprint& mine, int h) const {
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
        const ElementCounts own = counts_of(group_, hosts()->index(here), mine.description.call);
        check_count(mine.collective(), here, own.sent[there], there, theirs[1]);
        check_count(mine.collective(), there, theirs[0], here, own.received[there]);
      }
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

// Only two hosts know the numbers of elements between them, so all tell each other the result.
std::string HostsExchange::agree_on_counts(const CallFingerprint& mine, const OpContext& context) {
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
void HostsExchange::unpack(int h, const OpContext& context, ProgramRun& data) {
  try {
    data.unpack(leader(h), data_of(h), received(h).bytes);
  } catch (const std::invalid_argument& error) {
    group_.fail(AbortRecord::lost, error.what(), context);
  }
}

// Sets what follows from the headers of all hosts. A host with more regions has smaller ones, which
// limit the pieces of all; in an irregular call only the host itself knows its largest block.
void HostsExchange::combine(const Header& own, bool irregular, HostsAgreement& agreed) const {
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
void HostsExchange::lead(const CallFingerprint& mine, const Agreement& of_host,
                         const OpContext& context, ProgramRun* data) {
  const bool packs = data != nullptr && data->packs();
  HostsAgreement& agreed = group_.hosts_agreement(mine.description.call);
  const bool irregular = mine.has(Fingerprint::irregular);
  Header own = header(mine, MessageKind::fingerprint);
  own.pieces = of_host.pieces.count;
  own.piece = data != nullptr ? data->pieces().elements : of_host.pieces.elements;
  own.packs = packs;
  own.as_many = ipc::all_publish_as_many(group_, mine);
  post(own, context);
  for (int h = 0; h < hosts()->count(); ++h) {
    if (h == host()) continue;
    if (packs) data->pack(leader(h), *outbox_[h]);
    if (irregular) append_counts(mine, h);
  }
  send_all(context);
  await_all(mine, context);
  std::string why = compare(mine);
  combine(own, irregular, agreed);
  for (int h = 0; h < hosts()->count(); ++h)
    if (h != host() && agreed.packed != 0 && why.empty()) unpack(h, context, *data);
  if (irregular && why.empty()) why = agree_on_counts(mine, context);
  agreed.why = {};
  why.resize(std::min(why.size(), agreed.why.size() - 1));
  std::copy(why.begin(), why.end(), agreed.why.begin());
  agreed.calls.store(mine.description.call + 1, std::memory_order_release);
}

// Does not wait for the other hosts: they may not have made the call yet.
void HostsExchange::reject(const CallFingerprint& mine, const OpContext& context,
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
