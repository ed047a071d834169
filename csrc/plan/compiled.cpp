// Compiles a plan, and keeps what it compiled: a call that comes again costs a comparison of small
// integers, or one look in a table under a shared lock.
#include "compiled.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "order.h"

namespace pycollect {
namespace {

struct Key {
  const Algorithm* algorithm = nullptr;
  int world = 0, root = 0, pieces = 0;
  bool in_place = false;
  Pace pace = Pace::any;
  bool operator==(const Key&) const = default;
};

struct Hash {
  std::size_t operator()(const Key& k) const {
    std::size_t h = std::hash<const void*>()(k.algorithm);
    for (int part : {k.world, k.root, k.pieces, 2 * k.in_place + static_cast<int>(k.pace)})
      h = h * 1000003 + static_cast<std::size_t>(part);  // any large odd number spreads them
    return h;
  }
};

class Cache {
 public:
  std::shared_ptr<const Compiled> get(const Key& key) const {
    const std::shared_lock lock(mutex_);
    const auto found = kept_.find(key);
    return found == kept_.end() ? nullptr : found->second;
  }

  // Two threads may have compiled the same plan; all get the first one.
  std::shared_ptr<const Compiled> put(const Key& key, std::shared_ptr<const Compiled> made) {
    const std::unique_lock lock(mutex_);
    return kept_.emplace(key, std::move(made)).first->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Compiled>, Hash> kept_;
};

// Never destroyed: threads that outlive main may still be calling.
Cache& cache() {
  static Cache& it = *new Cache;
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

Compiled compile(Plan plan, bool in_place, Pace pace, const Algorithm* algorithm) {
  check(plan, in_place);
  static std::atomic<uint64_t> next_id{0};
  Compiled made{algorithm, in_place, std::move(plan), {}, {}, {}, {}, {}, next_id++};
  made.program = lower(made.plan, in_place, pace);
  made.levels = levels(made.program);
  made.finishes = finishes(made.plan, in_place);
  made.scratched = touched(made.plan, Buffer::scratch);
  made.staged = touched(made.plan, Buffer::host);
  return made;
}

std::shared_ptr<const Compiled> compiled(const Algorithm& algorithm, const Ask& ask, bool in_place,
                                         Pace pace) {
  struct Last {
    Key key;
    std::shared_ptr<const Compiled> value;
  };
  thread_local Last last;
  const Key key{&algorithm, ask.world, ask.root, ask.pieces, in_place, pace};
  if (last.key == key) return last.value;
  auto value = cache().get(key);
  if (!value)
    value = cache().put(
        key, std::make_shared<const Compiled>(compile(algorithm(ask), in_place, pace, &algorithm)));
  last = {key, value};
  return value;
}

}  // namespace pycollect
