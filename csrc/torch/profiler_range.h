// Names the time between its construction and destruction in profiles: a function of torch's
// profiler, such as "pycollect::all_reduce", and in CUDA builds an NVTX range. Costs some ns
// without a profiler.
#pragma once
#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace pycollect {

class ProfilerRange {
 public:
  explicit ProfilerRange(const char* call);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  std::string name_;  // the profiler keeps no copy
  std::optional<at::RecordFunction> record_;
};

bool is_profiled();  // does this thread's profiler, if it has one, want to know?

// The same for tools that know nothing of torch; nothing in builds without CUDA.
void begin_range(const char* call);
void end_range();

}  // namespace pycollect
