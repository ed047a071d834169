// Which stream of devices that are not there is a thread's current one: see with_results.
#include <algorithm>

#include "fake_devices.h"

namespace pycollect::dist {
namespace {

// Of the group's, and current in this thread while it is under its results; none: the caller's is.
struct Results {
  const FakeDevices* of = nullptr;
  std::size_t stream = FakeStreams::kCaller;
};
thread_local Results under_results;

}  // namespace

std::size_t FakeDevices::current() const {
  return under_results.of == this ? under_results.stream : current_;
}

// What a tensor is let go of with is known to the caller's stream only, whose next tensor may have
// that memory at once.
void FakeDevices::require_kept(const at::Tensor& t) const {
  const std::size_t stream = current();
  const bool known = std::any_of(kept_.begin(), kept_.end(), [&](const auto& kept) {
    return kept.first == stream && kept.second == t.storage().getWeakStorageImpl();
  });
  if (stream != current_ && !known)
    throw std::logic_error("a stream was given work on memory that nobody keeps for it");
}

void FakeDevices::with_results_of(std::size_t stream, c10::function_ref<void()> act) {
  struct Under {
    explicit Under(Results now) : before(std::exchange(under_results, now)) {}
    ~Under() { under_results = before; }
    const Results before;
  } const under({this, stream});
  act();
}

void FakeDevices::with_results(c10::ArrayRef<at::Device>, c10::function_ref<void()> act) {
  with_results_of(FakeStreams::kGroup, act);
}

// torch's future of CPU tensors has no streams to wait on: whoever waits for it looks at once.
void FakeDevices::complete_of(std::size_t stream, c10::function_ref<void()> act) {
  bool looks = false;
  {
    const std::lock_guard lock(mutex_);
    looks = looks_;
  }
  if (looks) {
    streams_->drain(FakeStreams::kCaller);
    streams_->drain(stream);
  }
  act();
}

void FakeDevices::complete(c10::ArrayRef<at::Device>, c10::function_ref<void()> act) {
  complete_of(FakeStreams::kGroup, act);
}

}  // namespace pycollect::dist
