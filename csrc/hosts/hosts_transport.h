// Transport of ranks on several hosts: shared memory within a host, and a wire between hosts. The
// first rank of every host exchanges a message with that of every other host before a call runs;
// the message has the host's fingerprint, and the data itself if that is small.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../rank_executor/shm_transport.h"
#include "../rank_executor/wire.h"
#include "hosts_link.h"

namespace pycollect::ipc {

class HostsTransport final : public ShmTransport {
 public:
  HostsTransport(Group& group, cpu::ParallelFor parallel_for, HostsLink link);
  ~HostsTransport() override;  // waits a little for other hosts to take a rejection

  Topology topology(bool) const override { return Topology::hosts; }
  bool keeps_order() const override { return link_.keeps_order; }
  bool may_use_tensors(std::size_t) const override { return false; }
  void begin(const CollectiveRequest& request, const OpContext& context) override;
  Agreement confirm(const CallFingerprint& mine, const Agreement& of_host, const OpContext& context,
                    ChunkLoop* loop) override;
  bool all_publish_as_many(const CallFingerprint& mine) const override;
  void reject(const CallFingerprint& mine, const OpContext& context, std::string_view why) override;

  void send(const HostTransfer& transfer, const std::byte* at, std::size_t bytes) override;
  void receive(const HostTransfer& transfer, std::byte* at, std::size_t bytes) override;
  void await_receive(const HostTransfer& transfer) override;
  void await_sends() override;

 private:
  struct Header;
  enum class MessageKind : uint32_t { fingerprint, rejection, verdict };
  int host() const { return hosts()->of(rank()); }
  bool leads() const { return group().rank() == 0; }
  Rank leader(int host) const { return hosts()->ranks(host)[0]; }

  void lead(const CallFingerprint& mine, const Agreement& of_host, const OpContext& context,
            ChunkLoop* loop);
  void settle(const OpContext& context);
  void await_sends(const OpContext& context);
  Header header(const CallFingerprint& mine, MessageKind kind) const;
  void post(const Header& header, const OpContext& context);
  void append(int host, const void* data, std::size_t bytes);
  void append_counts(const CallFingerprint& mine, int host);
  void send_all(const OpContext& context);
  void await_all(const CallFingerprint& mine, const OpContext& context);
  const Header& received(int host) const;
  const std::byte* data_of(int host) const;
  void unpack(int host, const OpContext& context, ChunkLoop& loop);
  std::string compare(const CallFingerprint& mine) const;
  void combine(const Header& own, bool irregular, HostsAgreement& agreed) const;
  std::string compare_counts(const CallFingerprint& mine, int host) const;
  std::string agree_on_counts(const CallFingerprint& mine, const OpContext& context);
  template <class F>
  void on_wire(const OpContext& context, Rank peer, const F& f);

  const HostsLink link_;
  // Of the current call: for waits for other hosts, and for waits within the host after the hosts
  // have agreed on it.
  OpContext context_ = {}, local_context_ = {};
  // The members below are used by the first rank of a host only.
  using Bytes = std::shared_ptr<std::vector<std::byte>>;
  std::vector<Bytes> inbox_, outbox_;  // [host]; the wire owns them, too
  std::vector<bool> owed_;  // [host]: a message that was not waited for, after a rejection
};

}  // namespace pycollect::ipc
