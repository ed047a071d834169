// See mirrored_rings.h.
#include "mirrored_rings.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>

#include "../../../group/system.h"

namespace pycollect::dist {
namespace {

// The channel's numbers for packets, for data that goes directly, and for hellos.
constexpr int kPackets = ipc::HostChannel::kFirstOfMessages, kDirectData = kPackets + 1,
              kHellos = kDirectData + 1;
constexpr std::byte kHello{1};

// Packets with ring data that may be under way to a peer. What is written meanwhile goes with the
// next one, as a packet takes longer than many small messages: 2,000 messages of 64 bytes took
// 44 us each with a packet for every message, and take 5.5 us. 2 to 8 packets measured alike.
constexpr int kMostUnderWay = 4;

// Packets of one peer that can be received while another one is copied.
constexpr int kPostedPackets = 2;

// A rank tells how far it has read when that is a fourth of the ring. A writer without room for a
// record, and the end of the ring that it skips, believes the ring to be more than three fourths
// full; then it is half full, and its reader takes messages that nobody expects.
constexpr std::size_t kAckFraction = 4;
static_assert(ipc::MailArea::max_eager_bytes(ipc::MailArea::kRemoteSharers) <=
              ipc::MailArea::message_bytes(ipc::MailArea::kRemoteSharers) / (2 * kAckFraction));

void copy_from(const ipc::RingMemory& ring, uint64_t position, std::byte* to, std::size_t bytes) {
  const std::size_t begin = position & (ring.bytes - 1);
  const std::size_t first = std::min(bytes, ring.bytes - begin);
  std::memcpy(to, ring.data + begin, first);
  std::memcpy(to + first, ring.data, bytes - first);
}

void copy_to(const ipc::RingMemory& ring, uint64_t position, const std::byte* from,
             std::size_t bytes) {
  const std::size_t begin = position & (ring.bytes - 1);
  const std::size_t first = std::min(bytes, ring.bytes - begin);
  std::memcpy(ring.data + begin, from, first);
  std::memcpy(ring.data, from + first, bytes - first);
}

// A packet has room for all that the rings can hold, so that it ends with a whole record.
constexpr std::size_t kPairBytes = ipc::MailArea::pair_bytes();

}  // namespace

// What the sender has written to each ring follows.
struct MirroredRings::PacketHeader {
  uint64_t received = 0;  // packets of the receiver of this one
  std::array<uint64_t, kRings> read{};
  std::array<uint32_t, kRings> bytes{};
  uint32_t wants_ack = 0;  // 1: a packet at once
  uint64_t number = 0;     // of the message whose data was sent before this packet; 0: none
};

MirroredRings::MirroredRings(std::shared_ptr<ipc::Group> group,
                             std::shared_ptr<GlooChannel> channel)
    : group_(std::move(group)), channel_(std::move(channel)) {
  for (Rank r = group_->world(); r < group_->all_ranks(); ++r) {
    Peer& peer = *peers_.emplace_back(std::make_unique<Peer>());
    peer.rank = group_->world_rank(r);
    peer.number = r;
  }
}

std::byte* MirroredRings::rings(Rank peer, bool outgoing) {
  return (outgoing ? at(peer).outgoing : at(peer).incoming).get();
}

void MirroredRings::open(Peer& peer) {
  if (peer.opened) return;
  const std::lock_guard lock(opening_mutex_);
  if (peer.opened) return;
  const auto new_rings = [](auto& memory) {
    // Not cleared: most peers never use more than the counters.
    memory.reset(new (std::align_val_t{128}) std::byte[kPairBytes]);
    const auto rings = ipc::MailArea::remote_rings(memory.get());
    for (const auto& ring : {rings.messages, rings.fragments, rings.replies})
      new (ring.counters) ipc::RingCounters;
    return rings;
  };
  const auto out = new_rings(peer.outgoing), in = new_rings(peer.incoming);
  peer.writes = {{{out.messages}, {out.fragments}, {in.replies}}};
  peer.reads = {{{in.messages}, {in.fragments}, {out.replies}}};
  if (!joined_) peer.thread = ipc::new_thread([this, &peer] { receive_packets(peer); });
  peer.opened = true;
}

void MirroredRings::answer_hellos() {
  for (const auto& peer : peers_) {
    if (peer->opened) continue;
    try {
      if (!peer->hello_posted)
        channel_->receive(peer->rank, kHellos, peer->hello.get(), 1, peer->hello);
      peer->hello_posted = true;
      if (std::atomic_ref(*peer->hello).load() == kHello) mailbox_->hello(peer->number);
    } catch (const std::exception&) {
      // One of the two ranks leaves, or there is no memory now.
    }
  }
}

void MirroredRings::join() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(opening_mutex_);
    joined_ = true;
    for (const auto& peer : peers_)
      if (peer->thread.joinable()) threads.push_back(std::move(peer->thread));
  }
  for (std::thread& thread : threads) thread.join();
}

void MirroredRings::publish(Rank peer) { send_news(at(peer), false, false); }

// A peer counts as gone only after its thread has taken all that it had sent.
void MirroredRings::send_news(Peer& peer, bool wants_ack, bool answers) {
  const std::lock_guard lock(peer.mutex);
  if (!peer.connected || peer.gone) return;
  try {
    send_packet(peer, wants_ack, answers);
  } catch (const ipc::ChannelFailure&) {
  }
}

void MirroredRings::receive_data(Rank peer, uint64_t number, std::byte* at, std::size_t bytes,
                                 ipc::MemoryOwner owner) {
  Peer& p = this->at(peer);
  const std::lock_guard lock(p.mutex);
  if (p.gone) return;
  try {
    p.incoming_data.emplace(number,
                            channel_->receive(p.rank, kDirectData, at, bytes, std::move(owner)));
  } catch (const ipc::ChannelFailure&) {
    // The thread of the peer finds that it is gone, or that this data cannot be received.
  }
}

void MirroredRings::send_data(Rank peer, uint64_t number, const std::byte* at, std::size_t bytes,
                              ipc::MemoryOwner owner) {
  Peer& p = this->at(peer);
  const std::lock_guard lock(p.mutex);
  if (p.gone) return;
  try {
    send_packet(p, false, false);  // what is written already need not wait for the data
    SentData sent{number, channel_->send(p.rank, kDirectData, at, bytes, std::move(owner))};
    send_packet(p, false, false, std::move(sent));
  } catch (const ipc::ChannelFailure&) {
    // The thread of the peer finds that it is gone.
  }
}

void MirroredRings::send_packet(Peer& peer, bool wants_ack, bool answers, SentData data) {
  PacketHeader header;
  header.received = peer.received;
  header.wants_ack = wants_ack;
  std::size_t bytes = 0;
  for (int i = 0; i < kRings; ++i) {
    const MirroredRing& mirrored = peer.writes[i];
    header.bytes[i] = static_cast<uint32_t>(mirrored.written() - mirrored.sent);
    bytes += header.bytes[i];
    header.read[i] = peer.reads[i].read();
  }
  const auto must_ack = [&](const MirroredRing& mirrored) {
    return mirrored.read() - mirrored.sent >= mirrored.ring.bytes / kAckFraction;
  };
  // Without an answer on its way, nothing would send what is held back. A packet may have to ask
  // for one, because the peer may have nothing else to say.
  const bool awaits_answer = peer.confirmed < peer.last_request;
  const bool is_held_back = awaits_answer && peer.pending_data >= kMostUnderWay;
  const bool has_news = (bytes != 0 && !is_held_back) || std::ranges::any_of(peer.reads, must_ack);
  if (!has_news && !wants_ack && !answers && data.number == 0) return;
  const bool should_request = bytes != 0 && peer.pending_data + 1 >= kMostUnderWay / 2;
  if (should_request && !awaits_answer) header.wants_ack = 1;
  header.number = data.number;
  const std::shared_ptr<std::byte[]> packet(new std::byte[sizeof header + bytes]);
  std::memcpy(packet.get(), &header, sizeof header);
  std::byte* to = packet.get() + sizeof header;
  for (int i = 0; i < kRings; to += header.bytes[i++])
    copy_from(peer.writes[i].ring, peer.writes[i].sent, to, header.bytes[i]);
  auto sent = channel_->send(peer.rank, kPackets, packet.get(), sizeof header + bytes, packet);
  for (int i = 0; i < kRings; ++i) {
    peer.writes[i].sent += header.bytes[i];
    peer.reads[i].sent = header.read[i];
  }
  ++peer.sent;
  if (bytes != 0) peer.last_needed = peer.sent, ++peer.pending_data;
  if (header.wants_ack != 0) peer.last_request = peer.sent;
  peer.pending.push_back(
      {.packet = std::move(sent), .has_ring_data = bytes != 0, .data = std::move(data)});
}

void MirroredRings::receive_packets(Peer& peer) {
  pthread_setname_np(pthread_self(), "pycollect mail");
  try {
    constexpr std::size_t most = sizeof(PacketHeader) + kPairBytes;
    struct PostedPacket {
      std::shared_ptr<std::byte[]> buffer{new std::byte[most]};
      ipc::HostTransferPtr pending = {};
    };
    std::array<PostedPacket, kPostedPackets> posted;
    const auto post = [&](PostedPacket& packet) {
      packet.pending =
          channel_->receive(peer.rank, kPackets, packet.buffer.get(), most, packet.buffer);
    };
    for (PostedPacket& packet : posted) post(packet);
    const std::shared_ptr<std::byte[]> hello(new std::byte[1]{kHello});
    channel_->send(peer.rank, kHellos, hello.get(), 1, hello);
    {
      const std::lock_guard lock(peer.mutex);
      peer.connected = true;
    }
    send_news(peer, false, false);
    std::exception_ptr closed;  // the packets that came before are taken nevertheless
    for (int i = 0;; i = (i + 1) % kPostedPackets) {
      if (!posted[i].pending) std::rethrow_exception(closed);
      // Kept until the next receive is posted: Gloo's buffer waits in its destructor for Gloo's
      // thread, which still holds it when it wakes this one. Messages of 64 bytes to 4 KiB would
      // take four times as long.
      const auto received = std::exchange(posted[i].pending, nullptr);
      channel_->await(received, ipc::Deadline::max());
      take(peer, posted[i].buffer.get());
      try {
        post(posted[i]);
      } catch (const ipc::ChannelFailure&) {
        closed = std::current_exception();
      }
    }
  } catch (const std::exception& error) {  // also if there is no memory
    lose(peer, error.what());
  }
}

void MirroredRings::take(Peer& peer, const std::byte* packet) {
  PacketHeader header;
  std::memcpy(&header, packet, sizeof header);
  const std::byte* from = packet + sizeof header;
  std::vector<SentPacket> confirmed;
  {
    const std::lock_guard lock(peer.mutex);
    // A packet whose send failed because the connections were closed meanwhile may have arrived.
    const uint64_t received = std::min(header.received, peer.sent);
    for (; peer.confirmed < received; ++peer.confirmed, peer.pending.pop_front()) {
      peer.pending_data -= peer.pending.front().has_ring_data;
      confirmed.push_back(std::move(peer.pending.front()));
    }
  }
  for (int i = 0; i < kRings; from += header.bytes[i++]) {
    const MirroredRing& mirrored = peer.reads[i];
    const uint64_t written = mirrored.written();
    copy_to(mirrored.ring, written, from, header.bytes[i]);
    mirrored.ring.counters->written.store(written + header.bytes[i]);
    peer.writes[i].ring.counters->read.store(header.read[i]);
  }
  ipc::MailArea(*group_).doorbell(group_->rank()).ring();
  for (const SentPacket& sent : confirmed) {
    channel_->await(sent.packet, ipc::Deadline::max());
    if (sent.data.number == 0) continue;
    channel_->await(sent.data.data, ipc::Deadline::max());
    mailbox_->moved_directly(peer.number, true, sent.data.number);
  }
  if (header.number != 0) await_data(peer, header.number);
  {
    const std::lock_guard lock(peer.mutex);
    ++peer.received;
  }
  send_news(peer, false, header.wants_ack != 0 || header.number != 0);
  if (header.number == 0) return;
  {
    const std::lock_guard lock(peer.mutex);
    peer.last_needed = peer.sent;
  }
  // After the answer: when this rank has its message, it may leave.
  mailbox_->moved_directly(peer.number, false, header.number);
}

// Does not wait long: the packet that announces the data came behind it. Throws if its receive
// could not be posted: the data is not there, although the peer has sent it.
void MirroredRings::await_data(Peer& peer, uint64_t number) {
  ipc::HostTransferPtr data;
  {
    const std::lock_guard lock(peer.mutex);
    const auto found = peer.incoming_data.extract(number);
    if (found.empty())
      throw ipc::ChannelFailure("the data of a message could not be received", false);
    data = std::move(found.mapped());
  }
  channel_->await(data, ipc::Deadline::max());
}

void MirroredRings::lose(Peer& peer, const std::string& failure) {
  decltype(peer.incoming_data) abandoned;  // their memory may be used again once the peer is gone
  {
    const std::lock_guard lock(peer.mutex);
    peer.failure = failure;
    abandoned.swap(peer.incoming_data);
  }
  for (const auto& [number, data] : abandoned) channel_->drop(data);
  abandoned.clear();  // without the lock: tensors may need the GIL
  peer.gone = true;
  any_gone_ = true;
  ipc::MailArea(*group_).doorbell(group_->rank()).ring();
}

bool MirroredRings::has_delivered() {
  bool all = true;
  for (const auto& peer : peers_) {
    if (!peer->opened) continue;
    bool wants_ack;
    {
      const std::lock_guard lock(peer->mutex);
      const bool sent = std::ranges::all_of(
          peer->writes, [](const auto& mirrored) { return mirrored.written() == mirrored.sent; });
      if (peer->gone || (sent && peer->last_needed <= peer->confirmed)) continue;
      all = false;
      wants_ack = peer->last_request < peer->last_needed;
    }
    if (wants_ack) send_news(*peer, true, false);
  }
  return all;
}

void MirroredRings::fail(Rank peer, bool is_late, const ipc::OpContext& context) {
  Peer& p = at(peer);
  if (is_late) channel_->fail_late(*group_, p.rank, context);
  std::string failure;
  {
    const std::lock_guard lock(p.mutex);
    failure = p.failure;
  }
  const ipc::AbortCause cause =
      channel_->cause_of(*group_, p.rank, ipc::ChannelFailure(failure, false));
  group_->fail(cause.kind, cause.text, context);
}

}  // namespace pycollect::dist
