// The data of one call of ranks on several hosts: which slices pass between hosts, and with which
// calls the ranks of a host distribute theirs. What passes between two hosts is spread over their
// ranks, in pieces, a few of which are under way at a time.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "hosts_executor.h"
#include "spans.h"

namespace pycollect::ipc {

class HostsCall {
 public:
  HostsCall(HostsExecutor& executor, const CollectiveRequest& request);
  void run();

 private:
  // A slice that comes from another host, and then is copied to its place.
  struct Arrival {
    Spans to;
    std::shared_ptr<std::byte[]> received;
    HostTransferPtr transfer;
  };
  // An input or output of a call of this host's ranks.
  struct Blocks {
    Spans data = {};
    Sizes sizes = {};
    void add(const Spans& block) {
      append(data, block);
      sizes.push_back(elements(block));
    }
    CallBuffer view() const { return {data, sizes}; }
  };

  void add_parts();
  void add_part(std::size_t begin, std::size_t step);
  void broadcast();
  void all_gather();
  void exchange_blocks();

  Rank rank_on(int host, int index) const { return hosts_.ranks(host)[index]; }
  // The rank of `host` that passes on to its host what comes from rank `r`.
  Rank relay(Rank r, int host) const {
    return rank_on(host, hosts_.index(r) % static_cast<int>(hosts_.ranks(host).size()));
  }
  std::size_t piece_elements(std::size_t peers) const;
  void send(Rank to, const Spans& from);
  void post(Rank from, Spans to);
  void finish(std::size_t most_left = 0);
  using PieceOf = std::function<Spans(Rank, std::size_t piece)>;
  void exchange(std::size_t piece, const PieceOf& from, const PieceOf& to);
  void run_here(Collective collective, const Blocks& in, const Blocks& out, bool in_place = false,
                Rank root = 0);

  HostsExecutor& executor_;
  const CollectiveRequest& r_;
  const Hosts& hosts_;
  const int host_;
  const Rank me_;
  const int index_;
  const std::size_t item_;
  const cpu::RowRunner row_;
  const CallBuffer& out_;  // the output, which may be the input
  std::deque<Arrival> arrivals_ = {};
  std::deque<std::size_t> posted_ = {};  // [piece, from the current one on]: number of arrivals

  friend class SumChain;
};

}  // namespace pycollect::ipc
