// Sums over hosts that have the ranks in their order: a host adds its ranks' data to the sum of the
// hosts before it, which it gets as accumulators, so the result is rounded once, as on one host.
// The ranks with the same index on their hosts are a rail, which adds up a share of the data, in
// pieces. The results of an all_reduce go back from host to host: 2 (H-1) hops for H hosts; S per
// link and direction. In tree order, a host gets a sum for each bit of the number of ranks before
// it, which is one sum if that is a power of two.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "hosts_call.h"

namespace pycollect::ipc {

class SumChain {
 public:
  explicit SumChain(HostsCall& call);
  void run();

 private:
  static constexpr std::size_t kAhead = 4, kPosted = 6;  // pieces
  static constexpr std::size_t kCarries = 16;            // accumulators of so many pieces are kept
  static constexpr std::size_t kBehind = 16;             // pieces whose results may still come

  // A part of the data that one rail adds up, for rank `to`, or for all: `share` elements of it are
  // in each group, as far as they reach.
  struct Part {
    std::size_t begin, count;
    int rail;
    Rank to;
    std::size_t share = 0;
  };
  void cut();
  // Returns how many elements a part has, if `count` are cut into `into` parts of whole lines.
  std::size_t in_lines(std::size_t count, std::size_t into) const;
  void place_rails(std::size_t groups);
  std::size_t count_of(const Part& part, std::size_t group) const;
  std::size_t rail_count(std::size_t group, int rail) const;
  std::size_t piece_count(std::size_t piece) const;  // of this rank's rail
  // Returns the slices of a buffer that a rail adds up in a group.
  Spans of_rail(const CallBuffer& buffer, std::size_t group, int rail) const;
  Spans wanted(const Part& part, std::size_t group) const;

  void post_carry(std::size_t piece);
  void post_results(std::size_t piece);
  void send(Rank to, const std::byte* at, std::size_t bytes, std::size_t& sent);
  // Waits until the first `sent` sends have ended, so that their memory may be used again.
  void await_sent(std::size_t sent) { executor_.await_sends(sends_ - sent); }
  void expose_data(std::size_t group);
  void add(std::size_t piece);
  void pass_on(std::size_t piece);
  void hand_out(std::size_t group);
  void deliver(std::size_t group);

  Rank rail_on(int host) const { return call_.rank_on(host, call_.index_); }
  std::byte* carry(std::size_t piece) const {
    return carries_ + piece % kCarries * of_piece_ * wide_ * std::max(sums_in_, sums_out_);
  }
  HostTransferPtr& carry_receive(std::size_t piece) { return carry_receives_[piece % kCarries]; }
  HostTransferPtr& result_receive(std::size_t piece) {
    return result_receives_[piece % result_receives_.size()];
  }
  std::size_t& carry_sent(std::size_t piece) { return carry_sent_[piece % kCarries]; }
  std::size_t& results_sent(std::size_t piece) {
    return results_sent_[piece % results_sent_.size()];
  }
  std::byte* results(std::size_t group) const {
    return results_ + group % kept_groups_ * of_rail_ * call_.item_;
  }
  std::byte* result(std::size_t piece) const {
    return results(piece / per_group_) + piece % per_group_ * of_piece_ * call_.item_;
  }

  HostsCall& call_;
  HostsExecutor& executor_;
  const CollectiveRequest& r_;
  const Hosts& hosts_;
  const int host_, last_, ranks_;  // this host, the last one, and the ranks of this one
  const bool returns_;             // the results go to all ranks
  const std::size_t wide_;         // bytes of an accumulator
  const int before_;               // ranks of the hosts before
  // Sums of the ranks before, and of them and this host's.
  const std::size_t sums_in_, sums_out_;
  std::vector<Part> parts_ = {};
  std::size_t of_rail_ = 0, of_piece_ = 0;  // most elements of a rail in a group, and in a piece
  std::size_t groups_ = 0, per_group_ = 1, pieces_ = 0;
  std::size_t kept_groups_ = 1;               // groups whose results are kept
  std::shared_ptr<std::byte[]> memory_ = {};  // of what follows
  std::size_t sends_ = 0;                     // of this rank so far
  // [place of a piece's carry, of its result]: sends until the last one from there.
  std::array<std::size_t, kCarries> carry_sent_ = {};
  std::vector<std::size_t> results_sent_ = {};
  std::byte *carries_ = nullptr, *results_ = nullptr;
  std::array<HostTransferPtr, kCarries> carry_receives_ = {};
  std::vector<HostTransferPtr> result_receives_ = {};
  // Bytes that a rank exposes of a group, and where those for each rail begin.
  std::size_t half_ = 0;
  Sizes rail_begins_ = {};
  std::vector<std::byte*> data_ = {};  // [rank of this host]: its data for this rail in a group
};

}  // namespace pycollect::ipc
