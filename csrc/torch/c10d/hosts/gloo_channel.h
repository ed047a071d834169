// The channel between hosts, over a Gloo process group of torch that has all ranks of the world.
// Thread-safe once it is connected.
//
// Gloo connects two ranks when both have begun to use the connection, may block the one that begins
// first, and ends the process if a connection comes about after it has been closed. So all ranks
// connect before the group is made, each to the ranks of other hosts one after the other, and none
// leaves before all have done so.
#pragma once
#include <atomic>
#include <limits>
#include <list>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../../../hosts/host_channel.h"
#include "../rank_communicator.h"

namespace pycollect::dist {

using TorchBackendPtr = c10::intrusive_ptr<c10d::Backend>;

// The ranks of several hosts, until they are connected. By keys in the store each tells the others
// that it is there, for whom it waits, and why it gives up.
class Meeting {
 public:
  // `keys`: a store for this group alone.
  Meeting(StorePtr keys, Rank me) : keys_(std::move(keys)), me_(me) {}

  // Waits until all ranks are there. Throws as Group::await, and what another rank gives up for.
  void await_all(ipc::Group& group, const ipc::OpContext& context);
  // The same until `ready`, while this rank waits for a rank of another host, `awaited`. Calls
  // `look` now and then, while the store is there.
  void await(ipc::FunctionRef<bool()> ready, const std::atomic<Rank>& awaited,
             ipc::FunctionRef<void()> look, ipc::Group& group, const ipc::OpContext& context);
  // Tells the others why this rank gives up: with the cause of `group`, if that is aborted, and
  // otherwise the error. `group` may be null.
  void give_up(ipc::Group* group, const std::exception& error) noexcept;

 private:
  void poll_until(ipc::FunctionRef<bool()> ready, ipc::FunctionRef<std::vector<Rank>()> late,
                  ipc::FunctionRef<void()> poll, ipc::Group& group, const ipc::OpContext& context,
                  ipc::FunctionRef<void()> look = {});

  const StorePtr keys_;
  const Rank me_;  // here and in keys, numbers are those in the world
  std::string store_failure_ = {};
};

class GlooChannel final : public ipc::HostChannel,
                          public std::enable_shared_from_this<GlooChannel> {
 public:
  GlooChannel(Hosts hosts, std::vector<std::string> names, Rank me, TorchBackendPtr gloo);
  ~GlooChannel() override;

  // Connects this rank to those of other hosts. Throws as Meeting::await. Call before all others.
  void connect(ipc::Group& group, Meeting& meeting, const ipc::OpContext& context);

  ipc::HostTransferPtr send(Rank to, int number, const std::byte* at, std::size_t bytes,
                            ipc::MemoryOwner owner) override;
  ipc::HostTransferPtr receive(Rank from, int number, std::byte* at, std::size_t bytes,
                               ipc::MemoryOwner owner) override;
  void await(const ipc::HostTransferPtr& transfer, ipc::Deadline deadline) override;
  void close(const ipc::AbortCause& why) override;
  std::optional<ipc::AbortCause> goodbye_of(Rank peer) const override;
  // Gives up a transfer that nobody awaits, and whose connection has broken.
  void drop(const ipc::HostTransferPtr& transfer);

  // Interrupts the waits whose time is over, and that of the thread that handles signals. Call
  // several times a second.
  void look_at_waits();
  // Waits until `peer` has said goodbye. Throws ChannelFailure if it cannot any more.
  void await_goodbye(Rank peer);

 private:
  // Numbers of messages of the channel itself.
  static constexpr int kNever = std::numeric_limits<int>::max(), kGoodbye = kNever - 1,
                       kConnected = kNever - 2, kAllConnected = kNever - 3;

  struct GlooTransfer;
  struct PeerEnd;
  struct BrokenConnection;
  struct GlooWait {
    c10d::Work& work;
    ipc::Deadline deadline;
    bool looks;  // for signals
  };
  ipc::HostTransferPtr post(bool sends, Rank peer, int number, std::byte* at, std::size_t bytes,
                            ipc::MemoryOwner owner);
  void connect_all(ipc::Deadline deadline);
  void exchange(int number, ipc::Deadline deadline);
  std::optional<BrokenConnection> find_broken();
  void await(c10d::Work& work, ipc::Deadline deadline);
  bool is_closed();

  const TorchBackendPtr gloo_;
  const std::vector<Rank> peers_;  // in an order in which all ranks can connect to each other
  std::vector<PeerEnd> ends_;      // [rank]: unused for those on this host
  // What the thread that connects tells the one that waits for it, until that gives up.
  std::atomic<std::size_t> begun_ = 0;  // connections: to the first peers
  std::atomic<Rank> awaited_ = peers_.front();
  std::atomic<bool> connected_ = false, has_failed_ = false, given_up_ = false;
  std::exception_ptr failure_ = {};  // of the awaited peer, if it has failed
  const ipc::AbortCause unjoined_;   // why the channel is closed if this rank gives up
  std::mutex closing_mutex_;
  std::mutex mutex_;  // guards the members below
  bool closed_ = false;
  std::set<ipc::HostTransferPtr> open_;  // begun, and not complete as far as this rank knows
  std::list<GlooWait> waits_;            // that are under way
};

}  // namespace pycollect::dist
