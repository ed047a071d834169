// See offsets.h.
#include "offsets.h"

#include "error.h"

namespace pycollect {

PlanOffsets::PlanOffsets(const Plan& plan, std::span<const std::size_t> blocks, std::size_t align)
    : world_(plan.world), chunks_(plan.chunks), align_(align) {
  require(align >= 1, "chunks are aligned to at least one element, not ", align);
  common_ = cut(blocks);
}

void PlanOffsets::set(Rank rank, Buffer buffer, const Sizes& blocks) {
  require(rank >= 0 && rank < world_, "there is no rank ", rank, " in a world of ", world_);
  others_.push_back(cut(blocks));
  other_of_.resize(static_cast<std::size_t>(world_) * kBuffers, kCommon);
  other_of_[rank * kBuffers + static_cast<int>(buffer)] = static_cast<int>(others_.size()) - 1;
}

ChunkOffsets PlanOffsets::cut(std::span<const std::size_t> blocks) const {
  require(!blocks.empty() && chunks_ % blocks.size() == 0, "a plan of ", chunks_,
          " chunks cannot be cut from ", blocks.size(), " blocks");
  ChunkOffsets offsets;
  offsets.bind(chunks_, blocks.size(), align_, [&](std::size_t i) { return blocks[i]; });
  return offsets;
}

void PlanOffsets::check(const Plan& plan) const {
  require(plan.chunks == chunks_ && plan.world == world_, "these offsets were bound to a plan of ",
          world_, " ranks and ", chunks_, " chunks, not ", plan.world, " and ", plan.chunks);
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
