// A call on devices that are not there: memory, streams and callers for a plan, the executor that
// serves real devices, and what became of it. For tests.
#pragma once
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "../cuda/executor.h"
#include "../plan/compiled.h"
#include "emulator.h"
#include "scene.h"

namespace pycollect::cuda {

struct Machine {
  Machine(int devices, RingSize ring)
      : cuda(Emulator::that_records(devices)), executor(*cuda, *cuda, ring) {}
  const std::shared_ptr<Emulator> cuda;
  Executor executor;
};

class Rehearsal {
 public:
  // On a machine of its own, or beside the calls of another rehearsal.
  explicit Rehearsal(Scene scene, const Rehearsal* beside = nullptr);

  void reseat(Workers workers, bool callers_apart);  // other streams from now on

  // Each caller writes its rank's memory, `calls` times the executor runs and the callers use and
  // overwrite everything, all without waiting; what was traced before is forgotten.
  void run(int calls = 1, bool capture = false);
  void fail_call(int in) { fail_in_ = in; }  // the executor's, in the next run
  void run_half_captured();  // while only the first caller's stream is under capture

  // Runs the trace, in a random order if there is a seed (as issued if it is negative), and holds
  // every result against the plan as written, run step by step. What differs, or nothing.
  std::string mismatch(int64_t seed);

  const Compiled& compiled() const { return compiled_; }  // after staging
  const Posts& posts() const { return posts_; }
  Emulator& cuda() { return cuda_; }
  Cut cut() const { return cut_; }

  StreamJudge judge() const { return StreamJudge(cuda_.trace()); }

 private:
  struct Block {  // one buffer of one rank of one tensor
    std::byte* base;
    Rank rank;
    std::vector<std::byte> before, after;  // what is in it, and must be
    bool is_judged, is_pageable;
    bool wrong = false;
  };
  struct Tensor {  // where it is cut: as written, and as staged
    Offsets written, run;
  };

  void make_posts();
  void add_tensor(int number);
  bool is_pageable(Rank rank, int buffer) const;
  std::byte* add_block(Rank rank, int buffer, std::size_t bytes);
  void expect();
  void execute();
  std::exception_ptr call();
  void callers_touch(const char* what, void (*act)(Block&));
  void through_callers(bool fork);

  Scene scene_;
  std::shared_ptr<Machine> machine_;
  Emulator& cuda_;
  Compiled written_, compiled_;
  Cut cut_;
  Posts posts_;
  int fail_in_ = -1;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Binding> expected_, bound_;
};

}  // namespace pycollect::cuda
