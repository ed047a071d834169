#include "program_choice.h"

#include <array>

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

const RankProgram& looked_up(Rank rank, const Request& r, const CallKey& s) {
  const Choice choice = choose(s, r.algorithm);
  // Kernels of processes that share a GPU run one after another.
  const bool multicast = s.topology == Topology::ipc_symmetric;
  return rank_program({choice.algorithm, s.world, choice.pieces, r.root, rank, r.in_place,
                       is_zero_copy(s.topology), multicast});
}

}  // namespace

const RankProgram& program_for(Rank rank, int world, const Request& r, const SelectionKey& key) {
  struct LastProgram {
    CallKey situation;
    std::string algorithm;
    Rank rank, root;
    const RankProgram* value = nullptr;
  };
  thread_local std::array<LastProgram, kTopologies> last;
  const CallKey s{r.collective, world, key.bytes, r.dtype, r.in_place, key.topology};
  LastProgram& kept = last[static_cast<std::size_t>(key.topology)];
  if (kept.value == nullptr || kept.situation != s || kept.rank != rank || kept.root != r.root ||
      kept.algorithm != r.algorithm)
    kept = {s, std::string(r.algorithm), rank, r.root, &looked_up(rank, r, s)};
  return *kept.value;
}

void check_sizes_known(const Request& request, const RankProgram& rank_program) {
  require(!request.irregular || rank_program.sizes_known, name(request.collective), ": algorithm '",
          request.algorithm, "' needs blocks of equal size; choose another algorithm");
}

FoldOptions fold_options(const Request& request, int world) {
  FoldOptions options = request.options;
  options.world = world;
  return options;
}

}  // namespace pycollect::shm
