// Refuses a malformed plan with a message that names the step. `verify` checks the result of a
// plan.
#include "plan.h"

#include <algorithm>
#include <limits>

#include "error.h"

namespace pycollect {
namespace {

const char* name(Buffer b) { return kBufferNames[static_cast<std::size_t>(b)]; }

// "out[2:4] of rank 1"
std::string words(const Slice& s) {
  const std::string last = s.count == 1 ? "" : text(":", s.first + s.count);
  return text(name(s.buffer), "[", s.first, last, "] of rank ", s.rank);
}

class Checking {
 public:
  Checking(const Plan& plan, bool in_place)
      : plan_(plan), in_place_(in_place), written_(cells(plan), LastWrite{kNever, 0}) {}

  void run() {
    for (; step_ < static_cast<int>(plan_.steps.size()); ++step_) {
      const Step& step = plan_.steps[step_];
      if (step.dsts.empty() || step.srcs.empty())
        refuse("needs at least one source and one destination, and has ", step.srcs.size(), " and ",
               step.dsts.size());
      if (step.by < Step::kFirstDestination || step.by >= plan_.world)
        refuse("is to be executed by rank ", step.by, ", which a world of ", plan_.world,
               " does not have");
      for (const Slices* side : {&step.dsts, &step.srcs})
        for (const Slice& s : *side) inside(s, step.dsts.front().count);
      for (const Slice& d : step.dsts) destination(d);
      for (const Slice& s : step.srcs) source(s);
    }
  }

 private:
  static constexpr int kNever = -1;
  struct LastWrite {
    int step, position;  // the last step that wrote this cell, as which chunk of its slice
  };

  // A plan may have millions of slices, so text is built only for a slice that is refused.
  void inside(const Slice& s, int count) const {
    if (s.rank < 0 || s.rank >= plan_.world)
      refuse("names ", words(s), ", but the world has ", plan_.world, " ranks");
    if (static_cast<int>(s.buffer) >= kBuffers)
      refuse("names a buffer that is not in, out, tmp or host");
    if (s.count < 1 || s.first < 0 || s.first > plan_.chunks - s.count)
      refuse("names ", words(s), ", but a buffer has ", plan_.chunks, " chunks");
    if (s.count != count) refuse("moves ", count, " chunks, but ", words(s), " has ", s.count);
  }

  void destination(const Slice& d) {
    int position = 0;
    each_cell(plan_, in_place_, d, [&](int c) {
      if (written_[c].step == step_) refuse("writes ", words(d), " twice");
      written_[c] = {step_, position++};
    });
  }

  // A source may contain cells that the step writes only at the same positions: then it is the same
  // slice as that destination, since all widths are equal.
  void source(const Slice& s) const {
    int position = 0;
    each_cell(plan_, in_place_, s, [&](int c) {
      if (written_[c].step == step_ && written_[c].position != position)
        refuse("reads ", words(s), ", which overlaps one of its destinations without being it");
      ++position;
    });
  }

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... why) const {
    throw std::invalid_argument(text("step ", step_, " ", why...));
  }

  const Plan& plan_;
  bool in_place_;
  std::vector<LastWrite> written_;
  int step_ = 0;
};

}  // namespace

void check(const Plan& plan, bool in_place) {
  require(plan.world >= 1, "a plan needs a world of at least one rank, not ", plan.world);
  require(plan.chunks >= 1, "a plan needs at least one chunk, not ", plan.chunks);
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  require(int64_t{plan.world} * kBuffers <= kMost / plan.chunks, "a plan of ", plan.world,
          " ranks and ", plan.chunks, " chunks has more cells than can be counted");
  Checking(plan, in_place).run();
}

}  // namespace pycollect
