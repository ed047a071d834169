#include "choice.h"

#include <array>

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

const Script& looked_up(Rank rank, const Request& r, const Situation& s) {
  const Choice choice = choose(s, r.algorithm);
  return script(
      {choice.algorithm, s.world, choice.pieces, r.root, rank, r.in_place, is_open(s.ground)});
}

}  // namespace

const Script& script_for(Rank rank, int world, const Request& r, const Scene& scene) {
  struct Last {
    Situation situation;
    Rank rank, root;
    const Script* value = nullptr;
  };
  thread_local std::array<Last, kGrounds> last;
  const Situation s{r.collective, world, scene.bytes, r.dtype, r.in_place, scene.ground};
  if (!r.algorithm.empty()) return looked_up(rank, r, s);
  Last& kept = last[static_cast<std::size_t>(scene.ground)];
  if (kept.value == nullptr || kept.situation != s || kept.rank != rank || kept.root != r.root)
    kept = {s, rank, r.root, &looked_up(rank, r, s)};
  return *kept.value;
}

void check_measured(const Request& request, const Script& script) {
  require(!request.irregular || script.measured, name(request.collective), ": algorithm '",
          request.algorithm, "' cannot move unlike blocks");
}

FoldOptions fold_options(const Request& request, int world) {
  FoldOptions options = request.options;
  options.world = world;
  return options;
}

}  // namespace pycollect::shm
