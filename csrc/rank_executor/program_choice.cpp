#include "program_choice.h"

#include <array>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

const RankProgram& look_up(const WorldMember& me, const CollectiveRequest& r,
                           const SelectionKey& s) {
  const Choice choice = choose(s, r.algorithm);
  return rank_program({choice.algorithm, s.world, choice.pieces, r.root, me.rank, r.in_place,
                       s.topology == Topology::shm_symmetric, s.hosts, choice.senders});
}

}  // namespace

const RankProgram& program_for(const WorldMember& me, const CollectiveRequest& r,
                               const SizeAndTopology& key) {
  struct LastProgram {
    SelectionKey call;
    std::string algorithm;
    Rank rank, root;
    const RankProgram* value = nullptr;
  };
  thread_local std::array<LastProgram, kTopologies> last;
  const SelectionKey s{r.collective, me.world, key.bytes,         r.dtype,        r.in_place,
                       key.topology, me.hosts, key.staging_bytes, key.keeps_order};
  LastProgram& cached = last[static_cast<std::size_t>(key.topology)];
  if (cached.value == nullptr || cached.call != s || cached.rank != me.rank ||
      cached.root != r.root || cached.algorithm != r.algorithm)
    cached = {s, std::string(r.algorithm), me.rank, r.root, &look_up(me, r, s)};
  return *cached.value;
}

void check_sizes_known(const CollectiveRequest& request, const RankProgram& rank_program) {
  require(!request.irregular || rank_program.sizes_known, name(request.collective), ": algorithm '",
          request.algorithm, "' needs blocks of equal size; choose another algorithm");
}

FoldOptions fold_options(const CollectiveRequest& request, int world) {
  FoldOptions options = request.options;
  options.world = world;
  return options;
}

}  // namespace pycollect::ipc
