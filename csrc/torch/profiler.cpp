// See profiler.h.
#include "profiler.h"

#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/version.h>

#include "../plan/error.h"
#include "c10d/rank_communicator.h"

namespace pycollect {
namespace {

using c10::DebugInfoKind;
using c10::ThreadLocalDebugInfo;
using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerStateBase;

ProfilerStateBase* profiler_of_this_thread() {
  return dynamic_cast<ProfilerStateBase*>(ThreadLocalDebugInfo::get(DebugInfoKind::PROFILER_STATE));
}

// Torch's profiler removes its callback before it frees events. The state of a profile that has
// ended may live on, for example in a work of another backend.
class StateOfEndedProfile : ProfilerStateBase {
 public:
  static bool is(const ProfilerStateBase& state) {
    return state.*(&StateOfEndedProfile::handle_) == 0;
  }
};

// Profiles of all threads, of which an event might end in the next one before torch 2.14.
bool next_profile_takes_events() {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 14)
  return false;
#else
  return ProfilerStateBase::get(/*global=*/true) != nullptr;
#endif
}

}  // namespace

// The profilers that make ranges of other tools end them on the thread that began them.
bool CallerProfile::is_active() {
  if (!at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) [[likely]]
    return false;
  ProfilerStateBase* const own = profiler_of_this_thread();
  return own ? own->profilerType() == ActiveProfilerType::KINETO : !next_profile_takes_events();
}

CallerProfile::CallerProfile()
    : callbacks_(at::get_record_function_tls_()), info_(ThreadLocalDebugInfo::current()) {}

ProfileGuard::ProfileGuard(const CallerProfile& caller)
    : callbacks_(at::get_record_function_tls_()), info_(ThreadLocalDebugInfo::current()) {
  at::set_record_function_tls_(caller.callbacks_);
  ThreadLocalDebugInfo::_forceCurrentDebugInfo(caller.info_.lock());
  const ProfilerStateBase* const state = profiler_of_this_thread();
  if (state && StateOfEndedProfile::is(*state))
    ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
}

ProfileGuard::~ProfileGuard() {
  ThreadLocalDebugInfo::_forceCurrentDebugInfo(info_);
  at::set_record_function_tls_(callbacks_);
}

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

std::shared_ptr<ProfilerEvent> ProfilerEvent::begin(const char* operation, at::TensorList inputs) {
  if (!CallerProfile::is_active()) [[likely]]
    return nullptr;
  return std::make_shared<ProfilerEvent>(operation, inputs);
}

ProfilerEvent::ProfilerEvent(const char* operation, at::TensorList inputs)
    : title_(text(dist::kBackendName, ':', operation)), record_(at::RecordScope::USER_SCOPE) {
  record_._setAsync();
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  record_.before(std::string_view(title_), &values);
}

ProfilerEvent::~ProfilerEvent() {
  const ProfileGuard of_caller(caller_);
  record_.end();
}

}  // namespace pycollect
