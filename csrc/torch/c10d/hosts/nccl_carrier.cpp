// See carrier.h. NCCL's kernels read and write the staging buffers, which are registered with the
// device, so data of CPU tensors and of CUDA tensors takes the same way. A work of NCCL waits only
// on a stream, and counts as complete when its communicator is aborted; so `await` polls, and
// trusts no work that ends when the carrier is closed.
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "../../../cuda_ipc/communicator.h"
#include "../../../plan/error.h"
#include "carrier.h"

namespace pycollect::dist {
namespace {

// Time between two looks at whether a transfer has ended: less than a small message takes.
constexpr std::chrono::microseconds kLook{20};

class NcclCarrier final : public Carrier {
 public:
  NcclCarrier(NcclGroups groups, std::shared_ptr<Carrier> other, const Hosts& hosts,
              const ipc::Group& group, std::shared_ptr<TorchRuntime> torch)
      : groups_(std::move(groups)),
        other_(std::move(other)),
        hosts_(hosts),
        me_(groups_.to_higher_ranks->getRank()),
        torch_(std::move(torch)),
        device_(torch_->with_index(at::kCUDA)),
        stream_(torch_->new_stream(device_)),
        gpu_(torch_->cuda(), [torch = torch_] { torch->empty_cache(); }),
        staging_(gpu_, stream_.device, group.staging_begin(),
                 group.staging_end() - group.staging_begin(), group.segment()),
        scratch_(group.unused_line()),
        unconnected_(column_peers()) {
    require(staging_.base() == group.staging_begin(),
            "between_hosts='nccl': the device has other addresses for host memory than the host");
  }
  ~NcclCarrier() override {
    abort();
    torch_->give_back(stream_);
  }

  void connect(Rank peer) override {
    other_->connect(peer);
    if (!in_column(peer)) return;
    require_open();
    const bool first = me_ < peer;
    for (const auto end : {first ? TransferEnd::send : TransferEnd::receive,
                           first ? TransferEnd::receive : TransferEnd::send})
      await(*begin_nccl(end, peer, scratch_, 1).work, ipc::Deadline::max());
    const std::lock_guard lock(mutex_);
    --unconnected_;
    changed_.notify_all();
  }

  // Torch's NCCL makes communicators and uses others without a lock, so no transfer begins before
  // the whole column is connected, and none while the groups are aborted.
  BegunTransfer begin(TransferEnd end, Rank peer, int number, std::byte* at, std::size_t bytes,
                      ipc::Deadline deadline) override {
    if (number < ipc::Wire::kFirstTransfer || number > ipc::Wire::kLastTransfer || !in_column(peer))
      return other_->begin(end, peer, number, at, bytes, deadline);
    std::unique_lock lock(mutex_);
    const bool known =
        changed_.wait_until(lock, deadline, [this] { return closed_ || unconnected_ == 0; });
    require_open();
    TORCH_CHECK(known, "not connected in time");
    return begin_nccl(end, peer, at, bytes);
  }

  // A work with an error makes torch end the process after a while, unless the group is aborted.
  bool await(c10d::Work& transfer, ipc::Deadline deadline) override {
    while (!closed_ && !transfer.isCompleted()) {
      TORCH_CHECK(ipc::Clock::now() < deadline, "Timed out");
      std::this_thread::sleep_for(kLook);
      if (interrupted_.exchange(false)) return false;
    }
    require_open();
    if (const auto error = transfer.exception()) {
      abort();
      std::rethrow_exception(error);
    }
    return true;
  }

  void interrupt(c10d::Work&) override { interrupted_ = true; }

  void close(const std::set<Rank>& peers) override {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      changed_.notify_all();
    }
    other_->close(peers);
    abort();
  }

 private:
  bool in_column(Rank peer) const { return hosts_.index(peer) == hosts_.index(me_); }
  int column_peers() const {
    int peers = -1;  // without this rank
    for (int h = 0; h < hosts_.count(); ++h)
      peers += hosts_.index(me_) < static_cast<int>(hosts_.ranks(h).size());
    return peers;
  }
  void require_open() const { TORCH_CHECK(!closed_, "the connections are closed"); }

  BegunTransfer begin_nccl(TransferEnd end, Rank peer, std::byte* at, std::size_t bytes) {
    const at::DisableRecordFunctionGuard no_event;
    std::vector<at::Tensor> tensors{at::for_blob(at, {static_cast<int64_t>(bytes)})
                                        .options(at::TensorOptions(at::kByte).device(device_))
                                        .target_device(device_)
                                        .make_tensor()};
    const bool sends = end == TransferEnd::send;
    auto& group = sends == (peer > me_) ? *groups_.to_higher_ranks : *groups_.to_lower_ranks;
    c10::intrusive_ptr<c10d::Work> work;
    // NCCL waits for the work on the current stream.
    torch_->with_streams({stream_}, [&] {
      work = sends ? group.send(tensors, peer, 0) : group.recv(tensors, peer, 0);
    });
    return {std::move(work), shared_from_this()};
  }

  void abort() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (std::exchange(aborted_, true)) return;
    for (const auto& group : {groups_.to_higher_ranks, groups_.to_lower_ranks}) {
      try {
        group->abort();
      } catch (const std::exception&) {  // the communicators do not end; nothing uses them any more
      }
    }
  }

  const NcclGroups groups_;
  const std::shared_ptr<Carrier> other_;
  const Hosts& hosts_;
  const Rank me_;
  const std::shared_ptr<TorchRuntime> torch_;
  const at::Device device_;
  const cuda::Stream stream_;
  cuda_ipc::CudaIpcMemory gpu_;
  const cuda_ipc::RegisteredHostMemory staging_;
  std::byte* const scratch_;
  std::atomic<bool> closed_{false}, interrupted_{false};
  std::mutex mutex_;  // guards the members below, and the groups while they are used or aborted
  std::condition_variable changed_;
  int unconnected_;  // ranks of the column
  bool aborted_ = false;
};

}  // namespace

std::shared_ptr<Carrier> nccl_carrier(NcclGroups groups, std::shared_ptr<Carrier> other,
                                      const Hosts& hosts, const ipc::Group& group,
                                      std::shared_ptr<TorchRuntime> torch) {
  return std::make_shared<NcclCarrier>(std::move(groups), std::move(other), hosts, group,
                                       std::move(torch));
}

}  // namespace pycollect::dist
