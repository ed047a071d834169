// Mirrored rings: the rings of a mailbox between ranks on different hosts, over their channel. Each
// of two ranks has a copy. A rank sends the other what it has written to its copy, and how far it
// has read, in packets. A thread for each peer with which there are messages always has receives
// posted, so a packet waits for nothing but those before it. It starts when either rank sends or
// receives the first message, and says hello to the other. Data flows as fast as it is read,
// because a ring has no room for more. The data of a large message goes past the rings if both ends
// are in host memory, and a packet behind it says that it has come.
#pragma once
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "../../../send_recv/mailbox.h"
#include "gloo_channel.h"

namespace pycollect::dist {

class MirroredRings final : public ipc::RemotePeers {
 public:
  MirroredRings(std::shared_ptr<ipc::Group> group, std::shared_ptr<GlooChannel> channel);
  ~MirroredRings() override { join(); }
  MirroredRings(const MirroredRings&) = delete;
  MirroredRings& operator=(const MirroredRings&) = delete;

  void attach(ipc::Mailbox& mailbox) override { mailbox_ = &mailbox; }
  void open(Rank peer) override { open(at(peer)); }
  std::byte* rings(Rank peer, bool outgoing) override;
  void publish(Rank peer) override;
  void receive_data(Rank peer, uint64_t number, std::byte* at, std::size_t bytes,
                    ipc::MemoryOwner owner) override;
  void send_data(Rank peer, uint64_t number, const std::byte* at, std::size_t bytes,
                 ipc::MemoryOwner owner) override;
  bool has_delivered() override;
  bool is_gone(Rank peer) const override { return at(peer).gone; }
  bool any_gone() const override { return any_gone_; }
  [[noreturn]] void fail(Rank peer, bool is_late, const ipc::OpContext& context) override;

  // Opens the peers that have said hello. Call now and then.
  void answer_hellos();
  // Waits for the threads. Call when the connections are closed.
  void join();

 private:
  static constexpr int kRings = 3;  // that a rank writes for a peer, and that it reads
  struct PacketHeader;
  struct PairMemory {
    void operator()(std::byte* pair) const { ::operator delete[](pair, std::align_val_t{128}); }
  };
  struct MirroredRing {
    ipc::RingMemory ring;
    uint64_t sent = 0;  // of the counter that this rank advances
    uint64_t written() const { return ring.counters->written.load(); }
    uint64_t read() const { return ring.counters->read.load(); }
  };
  struct SentData {   // directly, before the packet
    uint64_t number;  // of the message; 0: there is none
    ipc::HostTransferPtr data;
  };
  struct SentPacket {
    ipc::HostTransferPtr packet = {};
    bool has_ring_data = false;
    SentData data = {};
  };
  struct Peer {
    Rank rank, number;  // in the world, and as a peer of the mailbox
    std::unique_ptr<std::byte[], PairMemory> outgoing, incoming;
    std::thread thread;
    std::atomic<bool> opened = false, gone = false;
    bool hello_posted = false;  // its receive
    // kHello once the peer has said hello.
    const std::shared_ptr<std::byte> hello = std::make_shared<std::byte>();

    std::mutex mutex;  // guards the members below
    std::array<MirroredRing, kRings> writes, reads;
    bool connected = false;
    uint64_t sent = 0, confirmed = 0, received = 0;  // packets
    uint64_t last_request = 0;  // the last packet that requests an acknowledgment
    // The last packet that the peer must have before this rank leaves: it has ring data, or answers
    // to data that came directly.
    uint64_t last_needed = 0;
    std::deque<SentPacket> pending;  // not confirmed
    int pending_data = 0;            // those with ring data
    // [number of the message]: data that comes directly.
    std::unordered_map<uint64_t, ipc::HostTransferPtr> incoming_data;
    std::string failure;  // why it is gone
  };
  void open(Peer& peer);
  Peer& at(Rank peer) const { return *peers_[peer - group_->world()]; }
  void send_news(Peer& peer, bool wants_ack, bool answers);
  void send_packet(Peer& peer, bool wants_ack, bool answers, SentData data = {});
  void receive_packets(Peer& peer);
  void take(Peer& peer, const std::byte* packet);
  void await_data(Peer& peer, uint64_t number);
  void lose(Peer& peer, const std::string& failure);

  const std::shared_ptr<ipc::Group> group_;
  const std::shared_ptr<GlooChannel> channel_;
  ipc::Mailbox* mailbox_ = nullptr;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::mutex opening_mutex_;
  bool joined_ = false;
  std::atomic<bool> any_gone_{false};
};

}  // namespace pycollect::dist
