// See step_runner.h. A small call is to cost nanoseconds: nothing here allocates unless a step has
// very many slices.
#include "step_runner.h"

#include <algorithm>
#include <array>

#include "../plan/error.h"

namespace pycollect::cpu {
namespace {

// Destinations, then sources.
class PointerList {
 public:
  explicit PointerList(std::size_t n) {
    if (n <= few_.size()) return;
    many_.resize(n);
    at_ = many_.data();
  }

  void point(const Binding& binding, const Step& step, std::size_t row, std::size_t offset_bytes,
             std::size_t item) {
    void** next = at_;
    for (const Slices* side : {&step.dsts, &step.srcs})
      for (const Slice& s : *side) {
        const Memory& m = binding.memory[s.rank * kBuffers + static_cast<int>(s.buffer)];
        *next++ = m.base + m.pitch * static_cast<std::ptrdiff_t>(row) +
                  binding.offsets->begin(s) * item + offset_bytes;
      }
  }
  Pointers slice(std::size_t first, std::size_t n) const {
    return {at_ + first, static_cast<int>(n)};
  }

 private:
  std::array<void*, 64> few_;  // a step over 32 ranks
  std::vector<void*> many_;
  void** at_ = few_.data();
};

// Streamed stores push out of the caches what has just been read: in place that costs threefold.
bool keeps_apart(Pointers dsts, Pointers srcs) {
  return std::none_of(dsts.at, dsts.at + dsts.n, [&](const void* dst) {
    return std::find(srcs.at, srcs.at + srcs.n, dst) != srcs.at + srcs.n;
  });
}

// Scratch is there to be read soon.
bool writes_scratch(const Step& step) {
  return std::any_of(step.dsts.begin(), step.dsts.end(),
                     [](const Slice& s) { return s.buffer == Buffer::scratch; });
}

}  // namespace

StepRunner::StepRunner(const Call& call)
    : call_(call),
      item_(item_bytes(call.dtype)),
      finishing_(find_fold(call.dtype, call.op)),
      partial_(find_fold(call.dtype, call.op == ReduceOp::avg ? ReduceOp::sum : call.op)) {
  require_type(finishing_ != nullptr, name(call.op), " is not defined for ", name(call.dtype));
}

void StepRunner::run(const Binding& binding, int step, Range range, bool streamed) const {
  const Step& s = call_.compiled.plan.steps[step];
  const std::size_t width = binding.offsets->count(s.dsts[0]);
  PointerList at(streams(s));
  while (range.begin < range.end) {
    const std::size_t row = range.begin / width, from = range.begin % width;
    const std::size_t n = std::min(width - from, range.end - range.begin);
    at.point(binding, s, row, from * item_, item_);
    run_row(step, at.slice(0, s.dsts.size()), at.slice(s.dsts.size(), s.srcs.size()), n,
            streamed && !writes_scratch(s));
    range.begin += n;
  }
}

void StepRunner::run_row(int step, Pointers dsts, Pointers srcs, std::size_t count,
                         bool streamed) const {
  if (srcs.n == 1) return copy(dsts, srcs.at[0], count * item_, streamed);
  const Fold fold = call_.compiled.finishes[step] ? finishing_ : partial_;
  FoldOptions options = call_.options;
  options.non_temporal = streamed && keeps_apart(dsts, srcs);
  fold(dsts, srcs, count, options);
}

}  // namespace pycollect::cpu
