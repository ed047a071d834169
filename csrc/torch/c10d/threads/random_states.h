// Random states of ranks that take turns in one process: those of torch's default generators, of
// the CPU and, once CUDA is initialized, of all GPUs.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include <optional>
#include <vector>

#include "../../../plan/plan.h"

namespace pycollect::dist {

// `cuda` says whether CUDA is initialized: if not, this class must not call it, which would take
// long and disable CUDA in child processes.
class RandomStates {
 public:
  // Every rank begins with the states of this time, as processes forked now would.
  RandomStates(int world, bool cuda);
  void save(Rank rank, bool cuda) {
    if (!restored_) states_[rank] = current(cuda);
  }
  void load(Rank rank, bool cuda) {
    if (!restored_) set(states_[rank], cuda);
  }
  // Sets the states before the ranks, for good: a rank that the launch left behind loads no more.
  void restore(bool cuda) {
    restored_ = true;
    set(before_, cuda);
  }

 private:
  struct CudaState {
    uint64_t seed, offset;
  };
  struct RandomState {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
    std::vector<CudaState> cuda;  // [device]; empty: CUDA was not initialized
  };
  static RandomState current(bool cuda);
  static void set(const RandomState& state, bool cuda);

  const RandomState before_;
  std::vector<RandomState> states_;
  bool restored_ = false;
};

}  // namespace pycollect::dist
