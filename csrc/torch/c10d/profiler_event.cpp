// See profiler_event.h.
#include "profiler_event.h"

#include "../../plan/error.h"
#include "options.h"

namespace pycollect::dist {

std::shared_ptr<ProfilerEvent> ProfilerEvent::begin(const char* operation, at::TensorList inputs) {
  if (!CallerProfile::is_active()) [[likely]]
    return nullptr;
  return std::make_shared<ProfilerEvent>(operation, inputs);
}

ProfilerEvent::ProfilerEvent(const char* operation, at::TensorList inputs)
    : title_(text(kBackendName, ':', operation)), record_(at::RecordScope::USER_SCOPE) {
  record_._setAsync();
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  record_.before(std::string_view(title_), &values);
}

ProfilerEvent::~ProfilerEvent() {
  const ProfileGuard of_caller(caller_);
  record_.end();
}

}  // namespace pycollect::dist
