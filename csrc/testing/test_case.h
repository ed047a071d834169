// Test case of an emulated run: a plan, the devices of its ranks, the streams, and the chunk sizes.
#pragma once
#include <vector>

#include "../cuda/pinned_ring.h"
#include "../plan/compiled_plan.h"
#include "../plan/offsets.h"

namespace pycollect::cuda {

inline constexpr Device kPageableHost = -2;  // a rank whose memory is pageable host memory

// The worker streams of the ranks: the callers' streams, one stream per device, or one per rank.
enum class Workers { callers, devices, ranks };

// `uneven`: chunks differ in size. `each`: every chunk also differs from rank to rank, as in
// all-to-all-v. `even`: all chunks have the same size.
enum class ChunkSizes { uneven, each, even };

struct TestCase {
  Plan plan;
  bool in_place = false;
  LevelPolicy level_policy = LevelPolicy::any;
  std::vector<Device> devices;  // [rank]; kHost: pinned host memory; kPageableHost: pageable
  bool callers_apart = false;   // one current stream per rank instead of per device
  Workers workers = Workers::devices;
  bool copy_streams = false;  // separate streams for copies out to the host and in from it
  bool join_stream = false;   // a stream through which many streams join many (cuda/schedule.h)
  bool host_waits = true;     // whether the executor waits for ranks on the host
  bool peers = true;          // peer access between all devices; without it, the plan is staged
  int pieces = 1;             // pieces of a chunk, if the plan is staged
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int bindings = 1;                // number of tensors; every second tensor has two rows
  PinnedRingSize ring = {256, 3};  // small: copies are split, and pieces reused
};

int devices_of(const TestCase& test_case);       // number of devices that it needs
CompiledPlan staged(const TestCase& test_case);  // its plan, staged if these devices need that

// Returns offsets for `plan`, which is `written` or derived from it. No piece is empty. `number`:
// index of the tensor.
PlanOffsets make_offsets(ChunkSizes how, const Plan& written, const Plan& plan, int pieces,
                         int number);

// Returns the first of the chunk sizes, in the order of the enum, that the plan allows.
ChunkSizes choose_chunk_sizes(const Plan& written, const Plan& run, int pieces, int bindings);

// Returns pseudo-random values. The bits of a sum of such floats depend on the order of addition.
std::vector<std::byte> random_values(std::size_t bytes, DType type, uint64_t seed);

}  // namespace pycollect::cuda
