// Compiles plans and caches them. A repeated call costs a comparison with the thread's last key, or
// one lookup under a shared lock.
#include "compiled_plan.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "verify.h"

namespace pycollect {
namespace {

using Plans = std::map<PlanKey, CompiledPlan>;
using CachedPlan = Plans::value_type;

class PlanCache {
 public:
  const CachedPlan* find(const PlanKey& key) const {
    const std::shared_lock lock(mutex_);
    const auto found = plans_.find(key);
    return found == plans_.end() ? nullptr : &*found;
  }

  // Two threads may have compiled the same plan: both get the one that was stored first.
  const CachedPlan* add(const PlanKey& key, CompiledPlan made) {
    const std::unique_lock lock(mutex_);
    return &*plans_.emplace(key, std::move(made)).first;
  }

 private:
  mutable std::shared_mutex mutex_;
  Plans plans_;  // its entries never move
};

// Never destroyed: threads that outlive main may still be calling.
PlanCache& cache() {
  static PlanCache& it = *new PlanCache;
  return it;
}

std::vector<bool> touched(const Plan& plan, Buffer buffer) {
  std::vector<bool> used(plan.world);
  for (const Step& step : plan.steps)
    for (const Slices* side : {&step.dsts, &step.srcs})
      for (const Slice& s : *side)
        if (s.buffer == buffer) used[s.rank] = true;
  return used;
}

CompiledPlan compile(const PlanKey& key) {
  Plan whole = (*key.algorithm)({key.world, key.root, key.pieces});
  if (!key.reach) return compile(std::move(whole), key.in_place);
  // The chunks of a pipeline are already cut into pieces.
  const int pieces = whole.chunks >= key.pieces ? 1 : key.pieces;
  return compile(stage(whole, key.in_place, *key.reach, pieces), key.in_place,
                 LevelPolicy::one_task);
}

}  // namespace

CompiledPlan compile(Plan plan, bool in_place, LevelPolicy level_policy) {
  check(plan, in_place);
  static std::atomic<uint64_t> next_id{0};
  CompiledPlan made{in_place, std::move(plan), {}, {}, {}, {}, {}, false, 0, next_id++};
  made.program = lower(made.plan, in_place, level_policy);
  made.levels = levels(made.program);
  made.finishes = finishes(made.plan, in_place);
  made.scratched = touched(made.plan, Buffer::scratch);
  made.staged = touched(made.plan, Buffer::host);
  for (const std::vector<bool>* used : {&made.scratched, &made.staged})
    made.needs_memory |= std::find(used->begin(), used->end(), true) != used->end();
  for (const Step& step : made.plan.steps)
    made.most_sources = std::max(made.most_sources, step.srcs.size());
  return made;
}

const CompiledPlan& compiled(const PlanKey& key) {
  thread_local const CachedPlan* last = nullptr;
  if (last != nullptr && last->first == key) return last->second;
  const CachedPlan* found = cache().find(key);
  if (found == nullptr) found = cache().add(key, compile(key));
  last = found;
  return found->second;
}

}  // namespace pycollect
