// See profiler_event.h.
#include "profiler_event.h"

#include "../../plan/error.h"
#include "options.h"

namespace pycollect::dist {

std::shared_ptr<ProfilerEvent> ProfilerEvent::begin(const char* operation, at::TensorList inputs) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) [[likely]]
    return nullptr;
  return std::make_shared<ProfilerEvent>(std::move(*callbacks), operation, inputs);
}

ProfilerEvent::ProfilerEvent(at::StepCallbacks&& callbacks, const char* operation,
                             at::TensorList inputs)
    : title_(text(kBackendName, ':', operation)), record_(std::move(callbacks)) {
  record_._setAsync();
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  record_.before(std::string_view(title_), &values);
}

ProfilerEvent::~ProfilerEvent() {
  const at::ThreadLocalStateGuard as_caller(caller_);
  record_.end();
}

}  // namespace pycollect::dist
