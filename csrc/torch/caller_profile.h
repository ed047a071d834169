// CallerProfile: the profile of the thread that makes a call, for what ends later and on any
// thread. torch's profiler frees the events of a profile that has ended, and still writes into them
// if they end in its name.
#pragma once
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace pycollect {

class CallerProfile {
 public:
  // Whether a profiler of this thread takes such events. Costs a few ns without a profiler.
  static bool is_active();
  CallerProfile();  // of this thread

 private:
  friend class ProfileGuard;
  const at::RecordFunctionTLS callbacks_;
  const std::weak_ptr<c10::ThreadLocalDebugInfo> info_;
};

// Makes a caller's profile that of this thread, or none if it has ended. The guard must be brief:
// torch has no way to keep a profile from ending meanwhile.
class ProfileGuard {
 public:
  explicit ProfileGuard(const CallerProfile& caller);
  ~ProfileGuard();
  ProfileGuard(const ProfileGuard&) = delete;
  ProfileGuard& operator=(const ProfileGuard&) = delete;

 private:
  const at::RecordFunctionTLS callbacks_;
  const std::shared_ptr<c10::ThreadLocalDebugInfo> info_;
};

}  // namespace pycollect
