// ProfilerRange: shows its lifetime in profiles, as a function of torch's profiler, such as
// "pycollect::all_reduce", and in CUDA builds as an NVTX range. Without a profiler it costs a few
// ns.
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
  std::string name_;  // must outlive record_: the profiler keeps no copy
  std::optional<at::RecordFunction> record_;
};

bool is_profiled();  // whether a profiler records functions of this thread

// Begin and end an NVTX range. Do nothing in builds without CUDA.
void begin_range(const char* call);
void end_range();

}  // namespace pycollect
