// Executes collectives of ranks on several hosts, by ordinary calls of the ranks of each host and
// messages between hosts. All ranks of all hosts agree on a call before any output is written: the
// first rank of each host has the fingerprints of its ranks, and the first ranks exchange them,
// with the data if there is little.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "../rank_executor/executor.h"
#include "host_channel.h"

namespace pycollect::ipc {

class HostsExecutor final : public CollectiveExecutor {
 public:
  static constexpr std::size_t kExposedBytes = 4 << 20;  // GroupSettings::exposed_bytes

  HostsExecutor(Group& group, const cpu::ParallelFor& parallel_for,
                std::shared_ptr<HostChannel> channel);
  ~HostsExecutor() override;  // waits a little until other hosts have the last fingerprints

  void run(const CollectiveRequest& request, uint64_t call, Deadline deadline) override;
  void check(const CollectiveRequest& request) override;
  // Waits for all ranks, as their next call would otherwise meet this one.
  void refuse(Collective collective, uint64_t call, Deadline deadline,
              std::string_view why) override;

  // For a HostsCall. Data from one rank to another arrives in the order in which it is sent. When a
  // call fails, its transfers may go on until the connections are closed, so they use memory that
  // `owner` keeps, and never the caller's.
  const Hosts& hosts() const { return channel_->hosts(); }
  Rank rank() const { return me_; }  // in the world
  int host() const { return host_; }
  void run_here(CollectiveRequest request);  // a call of this host's ranks, as a part of this one
  void send(Rank to, const std::byte* at, std::size_t bytes, MemoryOwner owner) {
    send(to, kData, at, bytes, std::move(owner));
  }
  HostTransferPtr receive(Rank from, std::byte* at, std::size_t bytes, MemoryOwner owner) {
    return receive(from, kData, at, bytes, std::move(owner));
  }
  void await(const HostTransferPtr& transfer);
  // Waits until the memory of all but the last `most_left` sends may be changed.
  void await_sends(std::size_t most_left = 0);
  // Returns the exposed memory of rank `index` of this host.
  std::byte* exposed(int index) const { return group_.exposed(index); }
  void commit_exposed(std::size_t bytes);  // the first bytes of this rank's own
  // Returns memory that the next call of this method may return again.
  std::shared_ptr<std::byte[]> scratch(std::size_t bytes);

 protected:
  void agree(const CollectiveRequest& request, const CallFingerprint& mine,
             Deadline deadline) override;
  bool all_publish_as_many(const CallFingerprint& mine) const override;

 private:
  static constexpr int kAgreement = 0, kData = 1;  // numbers of messages
  struct Card;
  struct Verdict;
  struct Along;
  template <class F>
  auto or_close(const OpContext& context, const F& f);
  void begin(Collective user_collective, uint64_t call, Deadline deadline);
  void end();
  // Exchanges the ranks' cards. Returns what of the request's data came with them. Throws
  // std::invalid_argument on all ranks alike if the cards differ. `request` null: this rank
  // refuses.
  Along exchange(const Card& mine, const CollectiveRequest* request);
  Along exchange_cards(const Card& mine, const CollectiveRequest* request);
  Along along_of(const CollectiveRequest& request) const;
  void gather_counts(const CollectiveRequest& request);
  void gather_data(const CollectiveRequest& request, std::size_t bytes);
  void gather_behind_cards(std::byte* at, std::size_t bytes);
  void exchange_between_hosts(const CollectiveRequest* request, const Along& along);
  void compare(Verdict& verdict, const CollectiveRequest* request) const;
  const Card& card_of(Rank r) const;
  std::byte* behind_cards(Rank r, std::size_t bytes);
  void run_small(const CollectiveRequest& request, const Along& along);

  void send(Rank to, int number, const std::byte* at, std::size_t bytes, MemoryOwner owner);
  HostTransferPtr receive(Rank from, int number, std::byte* at, std::size_t bytes,
                          MemoryOwner owner);

  Rank first_rank(int host) const { return hosts().ranks(host)[0]; }
  bool is_first() const { return group_.rank() == 0; }

  Group& group_;
  const std::shared_ptr<HostChannel> channel_;
  const Rank me_;
  const int host_;
  RankExecutor here_;
  uint64_t calls_here_ = 0;
  // Of the current call: the user's collective, and the limits of the waits for this host's ranks
  // and for other hosts.
  Collective user_collective_ = Collective::barrier;
  OpContext here_context_ = {}, channel_context_ = {};
  std::deque<HostTransferPtr> sends_ = {};
  struct Cards {
    std::shared_ptr<std::byte[]> at;
    std::size_t bytes = 0;
  };
  std::vector<Cards> cards_;       // [host]: of its ranks, then what they send along
  std::vector<std::byte> answer_;  // the verdict, then the data of all ranks
  std::shared_ptr<std::byte[]> scratch_ = {};
  std::size_t scratch_bytes_ = 0, exposed_bytes_ = 0;
};

}  // namespace pycollect::ipc
