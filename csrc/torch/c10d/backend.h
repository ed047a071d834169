// The torch.distributed backend "pycollect": ranks that are processes of one host. It turns
// torch's calls into calls of the group's queue and messages of its mailbox.
#pragma once
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "arena_allocator.h"
#include "builders.h"
#include "coalescing.h"
#include "messages.h"
#include "options.h"
#include "queue.h"

namespace pycollect::dist {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using OptionsPtr = c10::intrusive_ptr<Options>;

// Shuts down all groups of this process that have not been: no thread of theirs may outlive the
// interpreter. Returns whether other threads were in calls, and have woken.
bool close_groups();

// Methods that only some versions of torch have say `virtual` where the others say `override`.
class Backend final : public c10d::Backend {
 public:
  // Returns when all ranks share memory; throws what shm::Group does.
  Backend(const StorePtr& store, Seat seat, OptionsPtr options);
  ~Backend() override;

  const std::string getBackendName() const override { return kBackendName; }
  // A copy: torch writes the next group's name into what it splits one off with.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_->clone();
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // all ranks count from zero
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Tensors in the memory that the ranks share: DDP's buckets, and pycollect.empty.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return allocator(); }
  std::shared_ptr<ArenaAllocator> allocator() const;
  Ladder& ladder() const { return *ladder_; }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const StorePtr& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  // Runs what this thread has asked for since, as one: all of it, or nothing of it on any rank.
  // Waits for the others where there are collectives and messages both.
  WorkPtr endCoalescing() override;
  // Instead of that: nothing runs, and `why` is told to the ranks that wait for its collectives.
  // `asked`: there are some that are not in the list. Does nothing where there is nothing to end.
  void abandonCoalescing(std::string_view why, bool asked);

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) override;
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

  // What the first collective of tensors on GPUs would do before anything else, with the group's
  // ranks, who all must come: torch calls it where a group is made with a device.
  void eagerConnectSingleDevice(at::Device device) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct Ask {
    Collective collective;
    const char* name;
    std::chrono::milliseconds timeout;
    bool later;  // may it run after this returns?
  };
  using Build = c10::function_ref<void(Call&)>;
  // `first`: what the call binds first; all of its tensors are on devices if that one is.
  WorkPtr collective(const Ask& ask, const at::Tensor* first, Build build);
  WorkPtr coalesce(CoalescedList& list, const Ask& ask, Call call, const at::Tensor* first,
                   Build build);
  std::optional<Refusal> attempt(const Ask& ask, const char* manner, Call& call, Build build) const;
  Call new_call(const Ask& ask) const;
  std::shared_ptr<Passage> begin(const Call& call, const at::Tensor* first);
  void rendezvous(const Call& before, at::Device device);
  void tell(const Refusal& refusal, Call call);
  void tell(const CoalescedList& list);

  WorkPtr message(const char* name, const Tensors& tensors, std::optional<Rank> peer, int tag,
                  bool receives);
  WorkPtr coalesce(CoalescedList& list, const Messages& messages, const char* name, bool receives,
                   c10::function_ref<Messages::Letter()> letter);
  std::vector<WorkPtr> post(const std::vector<CoalescedList::Message>& list);
  std::shared_ptr<Messages> messages(const char* name) const;
  std::shared_ptr<shm::Group> group() const;
  friend bool close_groups();
  void begin_life();
  // Returns an error that nobody has been told.
  std::exception_ptr close(shm::Deadline deadline);

  const Seat seat_;
  const OptionsPtr options_;
  const std::shared_ptr<Ladder> ladder_;
  const Forks forks_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> calls_{0};

  mutable std::mutex life_;  // of the group and its messages, which end when this is shut down
  std::shared_ptr<shm::Group> group_;
  std::shared_ptr<Messages> messages_;
  std::shared_ptr<ArenaAllocator> allocator_;
  std::shared_ptr<Queue> queue_;
  std::mutex meeting_;  // held by the thread that has the ranks meet

  std::shared_ptr<Coalescing> coalescing_ = std::make_shared<Coalescing>();

  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
  std::string last_split_name_;
};

}  // namespace pycollect::dist
