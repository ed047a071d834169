// Test case of an emulated run: a plan, ranks on devices, streams, and how memory is cut.
#pragma once
#include <vector>

#include "../cuda/pinned_ring.h"
#include "../plan/compiled.h"
#include "../plan/offsets.h"

namespace pycollect::cuda {

inline constexpr Device kPageableHost = -2;  // a rank whose memory is pageable host memory

// Worker streams: the callers' streams, one per device, or one per rank.
enum class Workers { callers, devices, ranks };

// Chunk sizes: different, different also from rank to rank, or all the same.
enum class ChunkSizes { uneven, each, even };

struct TestCase {
  Plan plan;
  bool in_place = false;
  LevelPolicy pace = LevelPolicy::any;
  std::vector<Device> devices;  // [rank]; kHost: in pinned memory; or kPageableHost
  bool callers_apart = false;   // a current stream per rank instead of per device
  Workers workers = Workers::devices;
  bool lanes = false;  // separate sender and receiver streams
  bool hub = false;
  bool host_waits = true;  // for ranks on the host; otherwise these ranks are asynchronous too
  bool peers = true;       // the devices reach each other; otherwise the plan is staged
  int pieces = 1;          // per chunk, where the plan is staged
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int bindings = 1;                // number of tensors; every second one has two rows
  PinnedRingSize ring = {256, 3};  // small, so that copies are split and pieces are reused
};

int devices_of(const TestCase& test_case);   // number of devices that the test_case needs
Compiled staged(const TestCase& test_case);  // the plan as these devices run it

// Offsets of `plan`, which is `written` or derived from it: chunks of different sizes (uneven),
// blocks from rank to rank of different sizes too, as all-to-all-v (each), or all the same (even).
// No piece is empty.
Offsets cut_as(ChunkSizes how, const Plan& written, const Plan& plan, int pieces, int number);

// The first Cut, in the order of the enum, that the plan allows.
ChunkSizes how_to_cut(const Plan& written, const Plan& run, int pieces, int bindings);

// Pseudo-random numbers; the bits of a float sum show the order in which they were added.
std::vector<std::byte> numbers(std::size_t bytes, DType type, uint64_t seed);

}  // namespace pycollect::cuda
