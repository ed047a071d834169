// Carriers: what a wire moves bytes with, which are process groups of torch that have all ranks of
// the world. Thread-safe. Methods throw what torch throws. Transfers have no events in profiles:
// one may be awaited after the profile in which it began has ended, and would write into freed
// memory.
#pragma once
#include <limits>
#include <memory>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../../../group/group.h"
#include "../../../plan/hosts.h"
#include "../../../rank_executor/wire.h"
#include "../../torch_runtime.h"

namespace pycollect::dist {

using TorchBackendPtr = c10::intrusive_ptr<c10d::Backend>;

class Carrier : public std::enable_shared_from_this<Carrier> {
 public:
  // A transfer that has begun, and the carrier that can await it.
  struct BegunTransfer {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<Carrier> carrier;
  };
  enum class TransferEnd { send, receive };

  virtual ~Carrier() = default;
  // Makes this rank and `peer` use the connection between them. Blocks until both do.
  virtual void connect(Rank peer) = 0;
  // May wait until other ranks are connected, and throws at the deadline.
  virtual BegunTransfer begin(TransferEnd end, Rank peer, int number, std::byte* at,
                              std::size_t bytes, ipc::Deadline deadline) = 0;
  // Throws at the deadline, and after close(). Returns false, without a result, after interrupt().
  virtual bool await(c10d::Work& transfer, ipc::Deadline deadline) = 0;
  // Ends a wait of another thread.
  virtual void interrupt(c10d::Work& transfer) = 0;
  // Closes the connections to `peers`, which are all that there are. None: ends what waits for
  // NCCL, and leaves Gloo's connections, which must be made before they are closed: Gloo ends the
  // process when a connection comes about after it has been closed.
  virtual void close(const std::set<Rank>& peers) = 0;
};

// Numbers of messages that only a carrier sends.
inline constexpr int kConnect = std::numeric_limits<int>::max() - 1, kNever = kConnect + 1;

std::shared_ptr<Carrier> gloo_carrier(TorchBackendPtr group);

// NCCL has no numbers of messages: two ranks exchange data in order, and a transfer waits for those
// before it. So each direction has a process group of its own.
struct NcclGroups {
  TorchBackendPtr to_higher_ranks, to_lower_ranks;
};
// Data of collectives goes through NCCL between ranks of the same number within their hosts, which
// are a column; everything else through `other`. The transfers of collectives must be of memory in
// the group's staging buffers, and a rank must receive from another in the order in which that one
// sends. The calling thread's current device moves the data.
std::shared_ptr<Carrier> nccl_carrier(NcclGroups groups, std::shared_ptr<Carrier> other,
                                      const Hosts& hosts, const ipc::Group& group,
                                      std::shared_ptr<TorchRuntime> torch);

}  // namespace pycollect::dist
