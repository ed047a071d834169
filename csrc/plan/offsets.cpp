// Stores chunk boundaries as running sums, once per distinct cut: in most calls all buffers are cut
// in the same way.
#include "offsets.h"

#include "error.h"

namespace pycollect {

PlanOffsets::PlanOffsets(const Plan& plan, const Sizes& blocks, std::size_t align)
    : chunks_(plan.chunks), align_(align), cut_of_(plan.world * kBuffers, 0) {
  require(align >= 1, "pieces are aligned to at least one element, not ", align);
  cuts_.push_back(cut(blocks));
}

void PlanOffsets::set(Rank rank, Buffer buffer, const Sizes& blocks) {
  require(rank >= 0 && rank * kBuffers < static_cast<int>(cut_of_.size()), "there is no rank ",
          rank, " in a world of ", cut_of_.size() / kBuffers);
  cuts_.push_back(cut(blocks));
  cut_of_[rank * kBuffers + static_cast<int>(buffer)] = static_cast<int>(cuts_.size()) - 1;
}

ChunkOffsets PlanOffsets::cut(const Sizes& blocks) const {
  require(!blocks.empty() && chunks_ % blocks.size() == 0, "a plan of ", chunks_,
          " chunks cannot be cut from ", blocks.size(), " blocks");
  ChunkOffsets offsets;
  offsets.bind(chunks_, blocks.size(), align_, [&](std::size_t i) { return blocks[i]; });
  return offsets;
}

void PlanOffsets::check(const Plan& plan) const {
  require(plan.chunks == chunks_ && plan.world * kBuffers == static_cast<int>(cut_of_.size()),
          "these offsets were bound to a plan of ", cut_of_.size() / kBuffers, " ranks and ",
          chunks_, " chunks, not ", plan.world, " and ", plan.chunks);
  auto size = [&](const Slice& s, int i) { return count({s.rank, s.buffer, s.first + i, 1}); };
  for (std::size_t n = 0; n < plan.steps.size(); ++n) {
    const Step& step = plan.steps[n];
    const Slice& like = step.dsts.front();
    for (const Slices* side : {&step.dsts, &step.srcs})
      for (const Slice& s : *side)
        for (int i = 0; i < s.count; ++i)
          require(size(s, i) == size(like, i), "chunks of one step differ in size: in step ", n,
                  " chunk ", s.first + i, " of rank ", s.rank, " has ", size(s, i),
                  " elements and chunk ", like.first + i, " of rank ", like.rank, " has ",
                  size(like, i));
  }
}

}  // namespace pycollect
