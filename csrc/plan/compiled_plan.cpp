// Compiles plans and caches them. A repeated call costs a comparison with the thread's last key, or
// one lookup in a hash table under a shared lock.
#include "compiled_plan.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "verify.h"

namespace pycollect {
namespace {

struct CompiledPlanKey {
  const Algorithm* algorithm = nullptr;
  int world = 0, root = 0, pieces = 0;
  bool in_place = false;
  LevelPolicy level_policy = LevelPolicy::any;
  bool operator==(const CompiledPlanKey&) const = default;
};

struct CompiledPlanHash {
  std::size_t operator()(const CompiledPlanKey& k) const {
    std::size_t h = std::hash<const void*>()(k.algorithm);
    for (int part : {k.world, k.root, k.pieces, 2 * k.in_place + static_cast<int>(k.level_policy)})
      h = h * 1000003 + static_cast<std::size_t>(part);  // any large odd number spreads them
    return h;
  }
};

class CompiledCache {
 public:
  std::shared_ptr<const CompiledPlan> get(const CompiledPlanKey& key) const {
    const std::shared_lock lock(mutex_);
    const auto found = kept_.find(key);
    return found == kept_.end() ? nullptr : found->second;
  }

  // Two threads may have compiled the same plan: both get the one that was stored first.
  std::shared_ptr<const CompiledPlan> put(const CompiledPlanKey& key,
                                          std::shared_ptr<const CompiledPlan> made) {
    const std::unique_lock lock(mutex_);
    return kept_.emplace(key, std::move(made)).first->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<CompiledPlanKey, std::shared_ptr<const CompiledPlan>, CompiledPlanHash> kept_;
};

// Never destroyed: threads that outlive main may still be calling.
CompiledCache& cache() {
  static CompiledCache& it = *new CompiledCache;
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

}  // namespace

CompiledPlan compile(Plan plan, bool in_place, LevelPolicy level_policy,
                     const Algorithm* algorithm) {
  check(plan, in_place);
  static std::atomic<uint64_t> next_id{0};
  CompiledPlan made{algorithm, in_place, std::move(plan), {}, {}, {}, {}, {}, 0, next_id++};
  made.program = lower(made.plan, in_place, level_policy);
  made.levels = levels(made.program);
  made.finishes = finishes(made.plan, in_place);
  made.scratched = touched(made.plan, Buffer::scratch);
  made.staged = touched(made.plan, Buffer::host);
  for (const Step& step : made.plan.steps)
    made.most_sources = std::max(made.most_sources, step.srcs.size());
  return made;
}

std::shared_ptr<const CompiledPlan> compiled(const Algorithm& algorithm,
                                             const AlgorithmParams& params, bool in_place,
                                             LevelPolicy level_policy) {
  struct LastCompiled {
    CompiledPlanKey key;
    std::shared_ptr<const CompiledPlan> value;
  };
  thread_local LastCompiled last;
  const CompiledPlanKey key{&algorithm,    params.world, params.root,
                            params.pieces, in_place,     level_policy};
  if (last.key == key) return last.value;
  auto value = cache().get(key);
  if (!value)
    value = cache().put(key, std::make_shared<const CompiledPlan>(
                                 compile(algorithm(params), in_place, level_policy, &algorithm)));
  last = {key, value};
  return value;
}

}  // namespace pycollect
