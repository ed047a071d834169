#include "choice.h"

#include <array>

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

const Script& looked_up(Rank rank, const Request& r, const Situation& s) {
  const Choice choice = choose(s, r.algorithm);
  // The launches of processes that share a GPU take turns.
  const bool at_once = s.ground == Ground::tracts;
  return script({choice.algorithm, s.world, choice.pieces, r.root, rank, r.in_place,
                 is_open(s.ground), at_once});
}

}  // namespace

const Script& script_for(Rank rank, int world, const Request& r, const Scene& scene) {
  struct Last {
    Situation situation;
    std::string algorithm;
    Rank rank, root;
    const Script* value = nullptr;
  };
  thread_local std::array<Last, kGrounds> last;
  const Situation s{r.collective, world, scene.bytes, r.dtype, r.in_place, scene.ground};
  Last& kept = last[static_cast<std::size_t>(scene.ground)];
  if (kept.value == nullptr || kept.situation != s || kept.rank != rank || kept.root != r.root ||
      kept.algorithm != r.algorithm)
    kept = {s, std::string(r.algorithm), rank, r.root, &looked_up(rank, r, s)};
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
