// Emulated run of a call: memory, streams and callers for a plan on emulated devices, the executor
// that also serves real devices, and checks of the result. For tests.
#pragma once
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "../cuda/executor.h"
#include "../plan/compiled.h"
#include "emulator.h"
#include "test_case.h"

namespace pycollect::cuda {

struct Machine {
  Machine(int devices, PinnedRingSize ring)
      : cuda(Emulator::that_records(devices)), executor(*cuda, *cuda, ring) {}
  const std::shared_ptr<Emulator> cuda;
  Executor executor;
};

class EmulatedRun {
 public:
  // Uses a machine of its own, or shares that of the rehearsal `beside`.
  explicit EmulatedRun(TestCase test_case, const EmulatedRun* beside = nullptr);

  void reseat(Workers workers, bool callers_apart);  // creates new streams for the next runs

  // Clears the trace, then does this `calls` times without waiting: each caller writes its rank's
  // memory, the executor runs, and the callers check and overwrite all memory.
  void run(int calls = 1, bool capture = false);
  void fail_call(int in) { fail_in_ = in; }  // CUDA call number `in` of the next run throws
  void run_half_captured();  // runs while only the first caller's stream is under capture

  // Runs the trace in a random order (as issued if the seed is negative), and compares every result
  // with that of the plan as written, run step by step. Returns the difference in words, or "".
  std::string mismatch(int64_t seed);

  const Compiled& compiled() const { return compiled_; }  // the plan as run, after staging
  const CallStreams& streams_of_ranks() const { return posts_; }
  Emulator& cuda() { return cuda_; }
  ChunkSizes cut() const { return cut_; }

  StreamJudge judge() const { return StreamJudge(cuda_.trace()); }

 private:
  struct TestBlock {  // one buffer of one rank of one tensor
    std::byte* base;
    Rank rank;
    std::vector<std::byte> before, after;  // content before the call, and expected after it
    bool is_judged, is_pageable;
    bool wrong = false;
  };
  struct TestTensor {  // chunk offsets for the plan as written, and as run
    Offsets written, run;
  };

  void make_posts();
  void add_tensor(int number);
  bool is_pageable(Rank rank, int buffer) const;
  std::byte* add_block(Rank rank, int buffer, std::size_t bytes);
  void expect();
  void execute();
  std::exception_ptr call();
  void callers_touch(const char* what, void (*act)(TestBlock&));
  void through_callers(bool fork);

  TestCase test_case_;
  std::shared_ptr<Machine> machine_;
  Emulator& cuda_;
  Compiled written_, compiled_;
  ChunkSizes cut_;
  CallStreams posts_;
  int fail_in_ = -1;
  std::vector<std::unique_ptr<TestTensor>> tensors_;
  std::vector<std::unique_ptr<TestBlock>> blocks_;
  std::vector<Binding> expected_, bound_;
};

}  // namespace pycollect::cuda
