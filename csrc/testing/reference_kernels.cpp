// See reference_kernels.h.
#include "reference_kernels.h"

#include <cstring>

#include "../cpu/fold.h"

namespace pycollect::cuda {

void fold(const LaunchWork& work, const Launch& how) {
  std::vector<void*> dsts(work.dsts.begin(), work.dsts.end()),
      srcs(work.srcs.begin(), work.srcs.end());
  const bool scales = how.op != ReduceOp::avg || work.finishes;
  const cpu::Fold run =
      cpu::find_fold(how.dtype, scales ? how.op : ReduceOp::sum, how.options.order);
  auto n = [](const std::vector<void*>& v) { return static_cast<int>(v.size()); };
  for (std::size_t r = 0; r < work.lines; ++r) {
    if (how.options.widens)
      cpu::AccumulatorFold(how.dtype, how.op)
          .run(work.finishes, {dsts.data(), n(dsts)}, true, {srcs.data(), n(srcs)}, 0, 0,
               work.count, how.options);
    else if (srcs.size() == 1)
      cpu::copy({dsts.data(), n(dsts)}, srcs[0], work.count * item_bytes(how.dtype), false);
    else
      run({dsts.data(), n(dsts)}, {srcs.data(), n(srcs)}, work.count, how.options);
    auto advance = [](std::vector<void*>& at, const std::vector<std::ptrdiff_t>& pitches) {
      for (std::size_t i = 0; i < pitches.size(); ++i)  // a single line may need no pitches
        at[i] = static_cast<std::byte*>(at[i]) + pitches[i];
    };
    advance(dsts, work.dst_pitches);
    advance(srcs, work.src_pitches);
  }
}

void move(const CopyRect& it) {
  for (std::size_t r = 0; r < it.rows; ++r) {
    const auto row = static_cast<std::ptrdiff_t>(r);
    std::memmove(it.dst + it.dst_pitch * row, it.src + it.src_pitch * row, it.bytes);
  }
}

}  // namespace pycollect::cuda
