// Calls of a plan on emulated devices by the same executor as on real devices, for tests: the test
// case (plan, devices of the ranks, streams, chunk sizes), and the run with its memory, streams,
// callers and checks of the results.
#pragma once
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../cuda/executor.h"
#include "../cuda/pinned_ring.h"
#include "../plan/compiled_plan.h"
#include "../plan/offsets.h"
#include "emulator.h"

namespace pycollect::cuda {

inline constexpr Device kPageableHost = -2;  // a rank whose memory is pageable host memory

// `uneven`: chunks differ in size. `each`: every chunk also differs from rank to rank, as in
// all-to-all-v. `even`: all chunks have the same size.
enum class ChunkSizes { uneven, each, even };

struct TestCase {
  Plan plan;
  bool in_place = false;
  LevelPolicy level_policy = LevelPolicy::any;
  std::vector<Device> devices;  // [rank]; kHost: pinned host memory; kPageableHost: pageable
  bool callers_apart = false;   // one current stream per rank instead of per device
  bool copy_streams = false;    // separate streams for copies out to the host and in from it
  bool host_waits = true;       // whether the executor waits for ranks on the host
  bool peers = true;            // peer access between all devices; without it, the plan is staged
  int pieces = 1;               // pieces of a chunk, if the plan is staged
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

struct EmulatedMachine {
  EmulatedMachine(int devices, PinnedRingSize ring)
      : cuda(std::make_shared<Emulator>(devices)), executor(*cuda, *cuda, ring) {}
  const std::shared_ptr<Emulator> cuda;
  Executor executor;
};

class EmulatedRun {
 public:
  // `machine_of`: another run, whose emulated machine this one shares; null: a machine of its own.
  explicit EmulatedRun(TestCase test_case, const EmulatedRun* machine_of = nullptr);

  void replace_streams(bool callers_apart);  // new streams for later runs

  // Begins a new log and issues `calls` calls without waiting. In each one, the callers write their
  // ranks' memory, the executor runs, and the callers check and overwrite all memory. Then all work
  // runs, as late as possible.
  void run(int calls = 1, bool capture = false);
  // In the next run, the CUDA call after `after` successful ones throws.
  void fail_call(int after) { fail_after_ = after; }
  // In all later runs, this wait for an event has no effect.
  void skip_wait(int number) { skipped_ = number; }
  void run_half_captured();  // runs while only the first caller's stream is capturing

  // Runs the last calls again in a random order (as issued if the seed is negative), and compares
  // the results with those of the original plan, run step by step. Returns a description of the
  // first difference, or "".
  std::string mismatch(int64_t seed);

  const CompiledPlan& compiled() const { return compiled_; }  // the plan as run, after staging
  const CallStreams& streams_of_ranks() const { return streams_; }
  Emulator& cuda() { return cuda_; }
  ChunkSizes chunk_sizes() const { return chunk_sizes_; }

  RaceDetector race_detector() const { return RaceDetector(cuda_.log()); }

 private:
  struct TestBlock {  // one buffer of one rank, for one tensor
    std::byte* base;
    Rank rank;
    std::vector<std::byte> before, after;  // content before and after the call
    bool is_checked, is_pageable;
    bool wrong = false;
  };

  void create_streams();
  void add_tensor(int number);
  bool is_pageable(Rank rank, int buffer) const;
  std::byte* add_block(Rank rank, int buffer, std::size_t bytes);
  void expect();
  void execute();
  void issue();
  std::exception_ptr call();
  void callers_access(const char* what, void (*act)(TestBlock&));
  void fork_or_join_callers(bool fork);

  TestCase test_case_;
  std::shared_ptr<EmulatedMachine> machine_;
  Emulator& cuda_;
  CompiledPlan written_, compiled_;
  ChunkSizes chunk_sizes_;
  CallStreams streams_;
  int fail_after_ = -1;
  std::optional<int> skipped_ = {};  // number of a wait
  int calls_ = 1;                    // of the last run
  bool capture_ = false;
  std::vector<std::unique_ptr<TestBlock>> blocks_;
  BoundPlan expected_, bound_;
};

}  // namespace pycollect::cuda
