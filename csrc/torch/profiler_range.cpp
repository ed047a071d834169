#include "profiler_range.h"

#include "../plan/error.h"

namespace pycollect {

ProfilerRange::ProfilerRange(const char* call) {
  begin_range(call);
  auto listeners = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!listeners) [[likely]]
    return;
  name_ = text("pycollect::", call);
  record_.emplace(std::move(*listeners));
  record_->before(std::string_view(name_));
}

bool is_profiled() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

ProfilerRange::~ProfilerRange() { end_range(); }

}  // namespace pycollect
