// One rank's side of a group: its collectives, its messages, and what it shares with the other
// ranks, which are processes or threads of this process. With the options of the group, and the
// allocator of the memory that processes share.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <functional>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../group/group.h"
#include "../../group/symmetric_heap.h"
#include "../../plan/dtype.h"
#include "../torch_runtime.h"
#include "binder.h"
#include "work.h"

namespace pycollect::rank_threads {
class RankScheduler;
}

namespace pycollect::dist {

inline constexpr const char* kBackendName = "pycollect";
inline constexpr const char* kOneHost = "one";

// Group options beyond torch's own: `pycollect.distributed.Options`, passed as `pg_options=`.
struct Options final : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds limit = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, limit) {}

  std::string algorithm = {};  // used by every collective that has it; empty: automatic
  // Of reductions: a name of kFoldOrderNames.
  std::string order = name(FoldOrder::rank);
  // Size of each of a rank's two staging buffers in host memory; none: default.
  std::optional<std::size_t> buffer_bytes = {};
  // Address space of each rank's symmetric heap; none: default.
  std::optional<std::size_t> symmetric_heap_bytes = {};
  // How ranks on several hosts work together: "exact", with the bits of one host, or "one": not.
  std::string hosts = "exact";
  bool is_default = false;   // the group is torch's default one, with which its store ends
  std::string version = {};  // of pycollect, and the commit of its build
  // Makes the process group of all ranks of the world for what goes between hosts.
  std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store>, int rank,
                                                  int world, std::chrono::milliseconds)>
      gloo = {};
  std::shared_ptr<TorchRuntime> torch = {};  // replaces torch's runtime in tests

  // Newer torch calls this override, so that a split-off group has its own options.
  virtual c10::intrusive_ptr<c10d::Backend::Options> clone() const {
    return c10::make_intrusive<Options>(*this);
  }
};

// torch's allocator interface to a rank's part of the symmetric heap. A tensor allocated there is
// an ordinary tensor, which collectives access without a copy.
class SymmetricHeapAllocator final : public c10::Allocator,
                                     public std::enable_shared_from_this<SymmetricHeapAllocator> {
 public:
  explicit SymmetricHeapAllocator(const ipc::Group& group) : heap_(group) {}

  // The returned memory keeps this allocator and the mapping alive, even after the group is gone.
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::size_t offset = heap_.allocate(bytes);
    const auto free = [owner = shared_from_this(), offset](void*) { owner->heap_.free(offset); };
    return c10::InefficientStdFunctionContext::makeDataPtr(heap_.data() + offset, free, at::kCPU);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) {
    return at::Tensor(at::detail::empty_generic(
        sizes, this, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt));
  }
  ipc::SymmetricHeap::HeapUsage usage() const { return heap_.usage(); }

 private:
  ipc::SymmetricHeap heap_;
};

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using OptionsPtr = c10::intrusive_ptr<Options>;

class RankCommunicator {
 public:
  virtual ~RankCommunicator() = default;

  // Collectives go through a queue, in call order. run() runs the call before it returns, and
  // throws its error; or enqueues it. A refusal makes the peers of the next call throw it.
  virtual void run(const CollectiveWorkPtr& work) = 0;
  // Enqueues the calls as one operation: all of them run or none, with no other call between them.
  virtual void push_all(const std::vector<CollectiveWorkPtr>& works) = 0;
  // Ranks that have made fewer calls than this one, as far as is known: those of this host.
  virtual std::vector<Rank> behind() = 0;

  // Posts a send or a receive, which moves independently of the collectives.
  virtual WorkPtr post(const P2POp& op) = 0;

  virtual const std::shared_ptr<DeviceOps>& devices() const = 0;

  // Returns the staging of a collective of device tensors.
  virtual std::shared_ptr<TensorStaging> begin_staging() = 0;

  // Allocation in memory that all ranks can access.
  virtual bool has_symmetric_memory(at::Device device) const = 0;
  virtual at::Tensor new_symmetric(at::Device device, int64_t count, at::ScalarType type) = 0;
  // Null: tensors of such memory are allocated with new_symmetric() only.
  virtual std::shared_ptr<SymmetricHeapAllocator> allocator() const = 0;

  // Throws if close() has been called.
  virtual void require_open(const char* operation) const = 0;
  // Throws the cause if the group has been aborted.
  virtual void require_healthy(const ipc::OpContext& context) const = 0;
  virtual void abort(const std::string& why) = 0;
  // Leaves the group. Pending calls may end before the deadline. Returns what a signal handler has
  // raised, or null. May be called again, from any thread.
  virtual std::exception_ptr close(ipc::Deadline deadline) = 0;
  // Called after close() by a rank that destroys its group, to make another one perhaps.
  virtual void await_end_of_store() {}
};

// Returns once all ranks of the group have called it. Throws what the constructor of ipc::Group
// throws.
std::shared_ptr<RankCommunicator> connect_processes(const StorePtr& store, RankAndWorld me,
                                                    const Options& options);

// The same for ranks that are threads of this process.
std::shared_ptr<RankCommunicator> connect_threads(
    const std::shared_ptr<rank_threads::RankScheduler>& scheduler, const StorePtr& store,
    RankAndWorld me, const Options& options);

}  // namespace pycollect::dist
