// Random states of ranks that take turns in one process: those of torch's default generators, of
// the CPU and of the GPUs that are in use.
#pragma once
#include <ATen/CPUGeneratorImpl.h>

#include <optional>
#include <vector>

#include "../../../plan/plan.h"

namespace pycollect::dist {

class RandomStates {
 public:
  // Every rank begins with the states of this time, as processes forked now would.
  explicit RandomStates(int world);
  void save(Rank rank);
  void load(Rank rank);

 private:
  struct CudaState {
    uint64_t seed, offset;
  };
  struct RandomState {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
    std::vector<std::optional<CudaState>> cuda;  // [device]; none: the device is not in use
  };
  static RandomState current();

  std::vector<RandomState> states_;
};

}  // namespace pycollect::dist
