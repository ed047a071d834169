// Finds which ranks reach each other's memory, and returns plans with copies through the host for
// ranks that do not.
#include <algorithm>
#include <map>
#include <mutex>

#include "../plan/stage.h"
#include "gpus.h"

namespace pycollect {
namespace {

bool reaches(at::Device from, at::Device to) {
  return gpu_calls(from.type()).runtime().reaches(from, to);
}

// Ranks on the host reach nothing directly, because they execute nothing; copies access their
// memory.
MemoryReach memory_reach_of(const DeviceList& devices, bool peer_access) {
  MemoryReach memory_reach{{}, std::vector(devices.size(), std::vector<bool>(devices.size()))};
  for (std::size_t r = 0; r < devices.size(); ++r) {
    memory_reach.on_host.push_back(devices[r].is_cpu());
    for (std::size_t of = 0; of < devices.size(); ++of)
      memory_reach.directly[r][of] =
          r == of || (peer_access && !devices[r].is_cpu() && !devices[of].is_cpu() &&
                      reaches(devices[r], devices[of]));
  }
  return memory_reach;
}

struct StagedKey {
  const Algorithm* algorithm;
  int world, root, pieces;
  bool in_place;
  std::vector<bool> reach;  // MemoryReach::on_host, then the rows of `directly`
  auto operator<=>(const StagedKey&) const = default;
};

std::shared_ptr<const CompiledPlan> staged(const Choice& choice, const SelectionKey& s, Rank root,
                                           const DeviceList& devices, bool peer_access) {
  static std::mutex mutex;
  static auto& cache = *new std::map<StagedKey, std::shared_ptr<const CompiledPlan>>;
  const MemoryReach memory_reach = memory_reach_of(devices, peer_access);
  StagedKey key{choice.algorithm, s.world, root, choice.pieces, s.in_place, memory_reach.on_host};
  for (const auto& row : memory_reach.directly)
    key.reach.insert(key.reach.end(), row.begin(), row.end());
  const std::lock_guard lock(mutex);
  auto& plan = cache[key];
  if (plan == nullptr) {
    const Plan whole = (*choice.algorithm)({s.world, root, choice.pieces});
    // The chunks of a pipeline are already cut into pieces.
    const int pieces = whole.chunks >= choice.pieces ? 1 : choice.pieces;
    plan = std::make_shared<const CompiledPlan>(
        compile(stage(whole, s.in_place, memory_reach, pieces), s.in_place, LevelPolicy::one_task,
                choice.algorithm));
  }
  return plan;
}

}  // namespace

Topology topology_of(const DeviceList& devices, bool peer_access) {
  if (!peer_access) return Topology::staged;
  if (std::all_of(devices.begin(), devices.end(), [&](at::Device d) { return d == devices[0]; }))
    return Topology::shared;
  DeviceList distinct;  // each device once: there may be many ranks on few devices
  for (at::Device d : devices)
    if (std::find(distinct.begin(), distinct.end(), d) == distinct.end()) distinct.push_back(d);
  for (at::Device from : distinct)
    for (at::Device to : distinct)
      if (from.is_cpu() || to.is_cpu() || !reaches(from, to)) return Topology::staged;
  return Topology::peers;
}

std::shared_ptr<const CompiledPlan> compiled_for(const Choice& choice, const SelectionKey& s,
                                                 Rank root, const DeviceList& devices,
                                                 bool peer_access) {
  if (s.topology == Topology::staged) return staged(choice, s, root, devices, peer_access);
  return compiled(*choice.algorithm, {s.world, root, choice.pieces}, s.in_place);
}

}  // namespace pycollect
