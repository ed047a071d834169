// ProfilerRange: shows its lifetime on this thread in profiles, as a function of torch's profiler,
// such as "pycollect::all_reduce", and in CUDA builds as an NVTX range. Without a profiler it costs
// a few ns.
#pragma once
#include <optional>
#include <string>

#include "caller_profile.h"

namespace pycollect {

class ProfilerRange {
 public:
  explicit ProfilerRange(const char* call);  // in the profile of this thread
  // In the profile of the thread that made the call, which must outlive the range; none: in no
  // profile.
  ProfilerRange(const char* call, const std::optional<CallerProfile>& caller);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  void record(const char* call);

  std::string name_;  // must outlive record_: the profiler keeps no copy
  std::optional<at::RecordFunction> record_;
  const CallerProfile* caller_ = nullptr;
};

// Begin and end an NVTX range. Do nothing in builds without CUDA.
void begin_range(const char* call);
void end_range();

}  // namespace pycollect
