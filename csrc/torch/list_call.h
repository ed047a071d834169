// ListCall: a call on the tensors of all ranks, whose arguments are checked and whose plans are
// bound to memory. It can run at once or later in a queue, and owns a reference to every tensor
// that it uses. Work: an asynchronous call, for which its caller waits.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "../cpu/executor.h"
#include "../cuda/api.h"
#include "../plan/select.h"
#include "arguments.h"

namespace pycollect {

// Alignment of chunks and buffers: they begin at whole vectors, and no two threads write the same
// cache line.
inline constexpr std::size_t kAlignBytes = 64;
constexpr std::size_t aligned_elements(std::size_t item) {
  return std::max<std::size_t>(kAlignBytes / item, 1);
}

using DeviceList = std::vector<at::Device>;
using Streams = std::vector<std::optional<c10::Stream>>;

// A copy between tensors of different layouts in memory, on the rank's stream. Between the memories
// of two ranks, it is that of `src`.
struct LayoutCopy {
  at::Tensor dst, src;
  Rank rank;
};

struct ListCall {
  const char* name = "";                       // of the Python function, for errors and profiles
  std::vector<BoundPlan> plans = {};           // one for each dtype of the tensors
  DeviceList devices = {};                     // [rank]
  Tensors written = {};                        // the caller's tensors that the call overwrites
  Tensors held = {};                           // its other tensors, which must outlive the run
  Tensors scratch = {};                        // memory of the call itself
  Tensors results = {};                        // returned tensors; empty for calls in place
  std::vector<LayoutCopy> layout_copies = {};  // run before the plans
  std::size_t bytes = 0;                       // approximate bytes of one rank
  Streams streams = {};                        // [rank]; none: the device's current stream
  std::vector<cuda::Stream> producers = {};    // of memory that is not torch's: its owners' streams
  bool peer_access = true;                     // whether GPUs may access each other's memory

  bool on_gpus() const {
    return std::any_of(devices.begin(), devices.end(), [](at::Device d) { return !d.is_cpu(); });
  }
  bool on_host() const {
    return std::any_of(devices.begin(), devices.end(), [](at::Device d) { return d.is_cpu(); });
  }
  at::Device first_gpu() const;  // the call must be on at least one
  // Chooses the algorithm, and returns its plan for the devices of the call's ranks, bound to no
  // memory yet.
  BoundPlan make_plan(SelectionKey key, std::string_view algorithm, Rank root, ReduceOp op) const;
  // Adds a binding to one of the call's plans. `memory` is [rank][buffer]. Scratch and host memory
  // is allocated here for the ranks where the plan uses it, and added to `scratch`.
  void bind(BoundPlan& plan, PlanOffsets offsets, std::vector<BufferMemory> memory,
            std::size_t rows = 1);
  // Replaces an input of the rank by `copy`, memory of the call itself, into which it copies it.
  void replace(at::Tensor& input, at::Tensor copy, Rank rank);
  // Bumps the versions of the tensors in `written`, so that autograd detects the change. Called
  // once, after all checks and before the run.
  void commit() const;
  void run() const;
  void run(const cpu::ParallelFor& parallel_for) const;  // on host memory

 private:
  void allocate(const BoundPlan& plan, Binding& binding);
  void find_pageable(Binding& binding) const;
};

// The tensors of one dtype in a call, which run one plan: their indices, and their bytes on one
// rank.
struct DtypeGroup {
  DType dtype;
  std::size_t bytes = 0;
  c10::SmallVector<std::size_t, 2> indices = {};
};
using DtypeGroups = c10::SmallVector<DtypeGroup, 1>;  // in the order of their first tensors
// Adds a tensor to the group of its dtype.
void add(DtypeGroups& groups, DType dtype, std::size_t index, std::size_t bytes);

class Work {
 public:
  explicit Work(Tensors results) : results_(std::move(results)) {}
  virtual ~Work() = default;

  // Returns false if the collective is not done after `seconds`. Throws the collective's error. On
  // GPUs the current streams wait; the host waits only if `seconds` is given.
  virtual bool wait(std::optional<double> seconds) = 0;
  virtual bool is_completed() = 0;
  virtual std::exception_ptr exception() = 0;
  const Tensors& results() const { return results_; }

 private:
  const Tensors results_;
};

// Enqueues a call: on its GPUs, or in the queue of host calls. A single thread runs that queue in
// order, so that calls do not compete for the cores.
std::shared_ptr<Work> enqueue(ListCall call);

bool busy();  // whether a host call is queued or running

// Waits until the queue of host calls is empty, so that a call that runs at once keeps its order
// behind queued ones. Costs one load if the queue is empty.
void drain();

}  // namespace pycollect
