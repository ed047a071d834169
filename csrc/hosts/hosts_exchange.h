// What goes between hosts in a call of a group over several hosts. The first rank of every host
// exchanges a message with that of every other host before a call runs; the message has the host's
// fingerprint, and the data itself if that is small.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../rank_executor/agreement.h"
#include "../rank_executor/program_run.h"
#include "../rank_executor/wire.h"
#include "hosts_link.h"

namespace pycollect::ipc {

class HostsExchange {
 public:
  HostsExchange(Group& group, HostsLink link);
  ~HostsExchange();  // waits a little for other hosts to take a rejection
  HostsExchange(const HostsExchange&) = delete;
  HostsExchange& operator=(const HostsExchange&) = delete;

  const Hosts* hosts() const { return link_.hosts; }
  bool keeps_order() const { return link_.keeps_order; }

  void begin(const OpContext& context);  // of a call
  // For waits within the host after the hosts have agreed on the call.
  const OpContext& local_context() const { return local_context_; }
  // Extends an agreement of this host's ranks to all hosts, with the data that `data`, if given,
  // can send along. Throws std::invalid_argument on all ranks alike if the hosts' calls differ.
  Agreement confirm(const CallFingerprint& mine, const Agreement& of_host, const OpContext& context,
                    ProgramRun* data);
  // Called after an agreement on several requests at once has thrown. Returns true if every rank of
  // all hosts has as many requests as this one and no rank has refused.
  bool all_publish_as_many(const CallFingerprint& mine) const;
  // Tells the other hosts that the ranks of this one do not make the call, for the reason `why`.
  void reject(const CallFingerprint& mine, const OpContext& context, std::string_view why);

  // Transfers between hosts: see Wire.
  void send(const HostTransfer& transfer, const std::byte* at, std::size_t bytes);
  void receive(const HostTransfer& transfer, std::byte* at, std::size_t bytes);
  void await_receive(const HostTransfer& transfer);
  void await_sends();

 private:
  struct Header;
  enum class MessageKind : uint32_t { fingerprint, rejection, verdict };
  int host() const { return hosts()->of(group_.world_rank(group_.rank())); }
  bool leads() const { return group_.rank() == 0; }
  Rank leader(int host) const { return hosts()->ranks(host)[0]; }

  void lead(const CallFingerprint& mine, const Agreement& of_host, const OpContext& context,
            ProgramRun* data);
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
  void unpack(int host, const OpContext& context, ProgramRun& data);
  std::string compare(const CallFingerprint& mine) const;
  void combine(const Header& own, bool irregular, HostsAgreement& agreed) const;
  std::string compare_counts(const CallFingerprint& mine, int host) const;
  std::string agree_on_counts(const CallFingerprint& mine, const OpContext& context);
  template <class F>
  void on_wire(const OpContext& context, Rank peer, const F& f);

  Group& group_;
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
