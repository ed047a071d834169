// How one rank of a group reaches the other ranks: through shared memory if they are processes, or
// directly if they are threads of this process.
#pragma once
#include <memory>

#include "binder.h"
#include "options.h"
#include "point_to_point.h"

namespace pycollect::rank_threads {
class RankScheduler;
}

namespace pycollect::dist {

class SymmetricHeapAllocator;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using OptionsPtr = c10::intrusive_ptr<Options>;

class Connection {
 public:
  virtual ~Connection() = default;
  virtual CallQueue& queue() = 0;
  // Null after close().
  virtual std::shared_ptr<PointToPoint> messages() const = 0;
  virtual const std::shared_ptr<DeviceOps>& devices() const = 0;

  // Returns the staging of a collective of device tensors.
  virtual std::shared_ptr<TensorStaging> begin_staging() = 0;

  // Allocation in memory that all ranks can access.
  virtual bool has_symmetric_memory(at::Device device) const = 0;
  virtual at::Tensor new_symmetric(at::Device device, int64_t count, at::ScalarType type) = 0;
  // Null: tensors of such memory are allocated with new_symmetric() only.
  virtual std::shared_ptr<SymmetricHeapAllocator> allocator() const = 0;

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
std::shared_ptr<Connection> connect_processes(const StorePtr& store, RankAndWorld me,
                                              const Options& options);

// The same for ranks that are threads of this process.
std::shared_ptr<Connection> connect_threads(
    const std::shared_ptr<rank_threads::RankScheduler>& scheduler, const StorePtr& store,
    RankAndWorld me, const Options& options);

}  // namespace pycollect::dist
