// A call whose arguments are checked and whose plans are bound to memory. It can run at once or
// later in a queue, and owns a reference to every tensor that it uses.
#pragma once
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "../cpu/executor.h"
#include "../cuda/api.h"
#include "../plan/select.h"
#include "arguments.h"

namespace pycollect {

// Alignment of pieces and buffers: they begin at whole vectors, and no two threads write the same
// cache line.
inline constexpr std::size_t kAlignBytes = 64;

struct PreparedCall;
using Streams = std::vector<std::optional<c10::Stream>>;

// The tensors of one dtype in a call: one plan, and a binding for each of its runs.
struct DtypePlan {
  std::shared_ptr<const CompiledPlan> compiled;
  DType dtype;
  ReduceOp op;
  FoldOptions options;
  bool named;                                                    // the caller named the algorithm
  std::vector<std::unique_ptr<const PlanOffsets>> offsets = {};  // of the bindings
  std::vector<Binding> bindings = {};

  BoundPlan bound() const { return {*compiled, bindings, dtype, op, options}; }
  // Adds a binding. `memory` is [rank][buffer]. Scratch and host memory is allocated here for the
  // ranks where the plan uses it, and added to the call's `scratch`.
  void bind(const PlanOffsets* at, std::vector<BufferMemory> memory, std::size_t rows,
            PreparedCall& prepared);
};

// A copy between tensors of different layouts in memory, on the rank's stream. Between the memories
// of two ranks, it is that of `src`.
struct LayoutCopy {
  at::Tensor dst, src;
  Rank rank;
};

struct PreparedCall {
  const char* call = "";  // the call's name, for errors and profiles
  std::vector<DtypePlan> parts = {};
  std::vector<at::Device> devices = {};        // [rank]
  Tensors held = {};                           // the caller's tensors, which must outlive the run
  Tensors scratch = {};                        // memory of the call itself
  Tensors results = {};                        // returned tensors; empty for calls in place
  std::vector<LayoutCopy> layout_copies = {};  // run before the parts
  std::size_t bytes = 0;                       // approximate bytes of one rank
  Streams streams = {};                        // [rank]; none: the device's current stream
  std::vector<cuda::Stream> producers = {};    // of memory that is not torch's: its owners' streams
  bool peer_access = true;                     // whether GPUs may access each other's memory
  Tensors written = {};  // tensors that the call overwrites; commit() bumps their version
  bool on_gpus() const;
  c10::DeviceType kind() const;  // of the GPUs; the call must be on at least one
  // Bumps the versions of the tensors in `written`, so that autograd detects the change. Called
  // once, after all checks and before the run.
  void commit();
  // Adds a copy into memory of the call itself.
  void add_layout_copy(const at::Tensor& dst, const at::Tensor& src, Rank rank);
  void run() const;
  void run(const cpu::ParallelFor& parallel_for) const;  // on host memory
};

// Chooses the algorithm and returns its plan for the devices of the call's ranks, from the cache if
// it is there.
DtypePlan make_dtype_plan(SelectionKey key, std::string_view algorithm, Rank root, ReduceOp op,
                          const PreparedCall& prepared);

}  // namespace pycollect
