// The torch.distributed backend "pycollect". It maps c10d collectives, send and recv to those of
// the rank's communicator.
#pragma once
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "builders.h"
#include "coalescing.h"
#include "rank_communicator.h"

namespace pycollect::dist {

// Closes every group of this process that is still open: no group thread may outlive the
// interpreter. Returns true if other threads were inside calls, after a bounded wait for them.
bool close_groups();

// Methods that are `virtual` here instead of `override` exist only in some versions of torch.
class Backend final : public c10d::Backend {
 public:
  // Returns once all ranks share memory. Throws what the constructor of ipc::Group throws.
  Backend(const StorePtr& store, RankAndWorld me, OptionsPtr options);
  ~Backend() override;

  const std::string getBackendName() const override { return kBackendName; }
  // Returns a copy, because torch writes the name of a split-off group into these options.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_->clone();
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // every rank counts from zero
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Allocation in symmetric memory, for DDP's buckets and pycollect.symmetric_empty.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return allocator(); }
  std::shared_ptr<SymmetricHeapAllocator> allocator() const;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const StorePtr& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  // Runs the calls that this thread has made since startCoalescing() as one operation: all of them,
  // or none on any rank. Waits for the collectives if the list holds messages too.
  WorkPtr endCoalescing() override;
  // Ends coalescing without running anything, and publishes `why` to peers that wait for its
  // collectives. `unlisted`: torch has collectives of this block that it has not passed to the
  // backend yet. If `unlisted` is false, does nothing for a thread without a list.
  void abandonCoalescing(std::string_view why, bool unlisted);

  WorkPtr all_reduce(at::TensorList tensors, const c10d::AllreduceOptions& o);
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return all_reduce(tensors, o);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return all_reduce(tensors, o);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override;
  WorkPtr barrier(const c10d::BarrierOptions& o) override;
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override;

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& o) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& o) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& o) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& o) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& o) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& o) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& o) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& o) override;
  virtual WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                     const c10d::GatherOptions& o);
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& o) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& o) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct CallParams {
    Collective collective;
    const char* name;
    std::chrono::milliseconds timeout;
    bool async;                  // true: the call may run after collective() returns
    at::TensorList inputs = {};  // for profiles
  };
  using Build = c10::function_ref<void(GroupCall&)>;
  WorkPtr collective(const CallParams& info, Build build);
  WorkPtr coalesce(CoalescedList& list, const CallParams& info, const CollectiveWorkPtr& work,
                   Build build);
  std::optional<Refusal> try_build(const CallParams& info, const char* prefix, GroupCall& call,
                                   Build build) const;
  CollectiveWorkPtr new_work(const CallParams& info, uint64_t number = 0) const;
  void publish_refusal(const Refusal& refusal, const CallParams& info);
  void publish_refusal(const CoalescedList& list);

  WorkPtr message(bool receives, const Tensors& tensors, std::optional<Rank> peer, int tag);
  WorkPtr coalesce(CoalescedList& list, c10::function_ref<P2POp()> op);
  std::vector<WorkPtr> post(const std::vector<CoalescedList::CoalescedMessage>& list);
  friend bool close_groups();
  void register_backend();

  const RankAndWorld me_;
  const OptionsPtr options_;
  const FoldOrder order_;
  const ipc::ForkGuard fork_guard_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> calls_{0};

  std::shared_ptr<RankCommunicator> communicator_;
  std::shared_ptr<Coalescing> coalescing_ = std::make_shared<Coalescing>();

  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
  std::string last_split_name_;
};

}  // namespace pycollect::dist
