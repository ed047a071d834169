// A name in profiles for what happens while this lives: one of torch's own profiler's functions,
// "pycollect::all_reduce", and in builds with CUDA a range of NVTX. Costs some ns when nobody
// looks.
#pragma once
#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace pycollect {

class Profiled {
 public:
  explicit Profiled(const char* call);
  ~Profiled();
  Profiled(const Profiled&) = delete;
  Profiled& operator=(const Profiled&) = delete;

 private:
  std::string name_;  // the profiler keeps no copy
  std::optional<at::RecordFunction> record_;
};

bool is_profiled();  // does this thread's profiler, if it has one, want to know?

// The same for tools that know nothing of torch; nothing in builds without CUDA.
void begin_range(const char* call);
void end_range();

}  // namespace pycollect
