// A call that has been checked and bound to memory: it can run now, or later on the queue, and
// holds what it touches until it has run.
#pragma once
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "../cpu/executor.h"
#include "../plan/select.h"
#include "arguments.h"

namespace pycollect {

// Pieces and buffers begin at whole vectors, and no two threads write one cache line.
inline constexpr std::size_t kAlignBytes = 64;

struct PreparedCall;
using Streams = std::vector<std::optional<c10::Stream>>;

// All tensors of one dtype in a call: one plan, run on every binding.
struct DtypePlan {
  std::shared_ptr<const Compiled> compiled;
  DType dtype;
  ReduceOp op;
  FoldOptions options;
  bool named;  // did the caller choose the algorithm?
  std::vector<std::unique_ptr<const Offsets>> offsets = {};
  std::vector<Binding> bindings = {};

  // `memory` is [rank][buffer]; scratch is added here where the plan has a use for it, and held by
  // the job.
  void bind(const Offsets* at, std::vector<Memory> memory, std::size_t rows, PreparedCall& job);
};

struct PreparedCall {
  const char* call;  // its name, for profiles
  std::vector<DtypePlan> parts = {};
  std::vector<at::Device> devices = {};  // of the ranks
  Tensors held = {};                     // everything that must outlive the run
  Tensors results = {};                  // what the call returns; nothing for calls in place
  std::vector<std::pair<at::Tensor, at::Tensor>> transposes = {};  // dst and src of unlike layouts
  std::size_t bytes = 0;                                           // of one rank, about
  Streams streams = {};     // [rank], where the caller named them
  bool peer_access = true;  // may a GPU read and write another's memory?
  Tensors written = {};     // what autograd has saved of these is no longer what they hold
  bool on_gpus() const;
  void commit();  // after the last refusal, before the run: `written` get a new version
  void run() const;
};

// Chooses the algorithm and takes its plan, for the devices of the call's ranks, from the cache.
DtypePlan make_dtype_plan(CallKey key, std::string_view algorithm, Rank root, ReduceOp op,
                          const PreparedCall& call);

}  // namespace pycollect
