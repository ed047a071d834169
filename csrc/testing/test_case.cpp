// See test_case.h.
#include "test_case.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "../plan/error.h"
#include "../plan/passes.h"

namespace pycollect::cuda {

int devices_of(const TestCase& test_case) {
  require(static_cast<int>(test_case.devices.size()) == test_case.plan.world, "there are ",
          test_case.devices.size(), " devices; pass one for each of ", test_case.plan.world,
          " ranks");
  return std::max(0, *std::max_element(test_case.devices.begin(), test_case.devices.end())) + 1;
}

CompiledPlan staged(const TestCase& test_case) {
  const int world = test_case.plan.world;
  MemoryReach reach{std::vector<bool>(world), {}};
  bool all = true;
  for (Rank r = 0; r < world; ++r) {
    reach.on_host[r] = test_case.devices[r] < 0;
    reach.directly.emplace_back();
    for (Rank of = 0; of < world; ++of)
      reach.directly[r].push_back(test_case.peers || test_case.devices[r] == test_case.devices[of]);
    all &= !reach.on_host[r] && reach.directly[r] == std::vector<bool>(world, true);
  }
  if (all) return compile(test_case.plan, test_case.in_place, test_case.level_policy);
  return compile(stage(test_case.plan, test_case.in_place, reach, test_case.pieces),
                 test_case.in_place, test_case.level_policy);
}

PlanOffsets make_offsets(ChunkSizes how, const Plan& written, const Plan& plan, int pieces,
                         int number) {
  const std::size_t least = pieces;
  auto size = [&](std::size_t a) {
    return least + (how == ChunkSizes::even ? 0 : (7 * a + number) % 3);
  };
  Sizes sizes;
  for (int c = 0; c < written.chunks; ++c) sizes.push_back(size(c));
  PlanOffsets offsets(plan, sizes);
  for (int r = 0; how == ChunkSizes::each && r < written.world; ++r) {
    Sizes given, got;
    for (int of = 0; of < written.chunks; ++of) {
      given.push_back(size(3 * r + of));
      got.push_back(size(3 * of + r));
    }
    offsets.set(r, Buffer::input, given);
    offsets.set(r, Buffer::output, got);
  }
  return offsets;
}

ChunkSizes choose_chunk_sizes(const Plan& written, const Plan& run, int pieces, int bindings) {
  for (ChunkSizes how : {ChunkSizes::uneven, ChunkSizes::each}) try {
      for (int number = 0; number < bindings; ++number) {
        PlanOffsets offsets = make_offsets(how, written, run, pieces, number);
        cut_host_memory(run, offsets);
      }
      return how;
    } catch (const std::invalid_argument&) {
    }
  return ChunkSizes::even;
}

std::vector<std::byte> random_values(std::size_t bytes, DType type, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i + item_bytes(type) <= bytes; i += item_bytes(type)) {
    const float value = std::uniform_real_distribution<float>(-1, 1)(random);
    const uint64_t bits = random();
    if (type == DType::f32)
      std::memcpy(&made[i], &value, sizeof value);
    else if (type == DType::bf16)  // the upper half of a float
      std::memcpy(&made[i], reinterpret_cast<const char*>(&value) + 2, 2);
    else
      std::memcpy(&made[i], &bits, item_bytes(type));
  }
  return made;
}

}  // namespace pycollect::cuda
