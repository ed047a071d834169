#include "profiler_range.h"

#include "../plan/error.h"

namespace pycollect {

ProfilerRange::ProfilerRange(const char* call) {
  begin_range(call);
  record(call);
}

ProfilerRange::ProfilerRange(const char* call, const std::optional<CallerProfile>& caller) {
  begin_range(call);
  if (!caller) return;
  caller_ = &*caller;
  const ProfileGuard of_caller(*caller);
  record(call);
}

void ProfilerRange::record(const char* call) {
  auto listeners = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!listeners) [[likely]]
    return;
  name_ = text("pycollect::", call);
  record_.emplace(std::move(*listeners));
  record_->before(std::string_view(name_));
}

ProfilerRange::~ProfilerRange() {
  end_range();
  if (!caller_) return;
  const ProfileGuard of_caller(*caller_);
  record_.reset();
}

}  // namespace pycollect
