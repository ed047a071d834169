// See fake_devices.h.
#include "fake_devices.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstring>

#include "../../plan/error.h"
#include "../threads.h"

namespace pycollect::dist {
namespace {

constexpr unsigned char kPoison = 0xA5;
// Results of fewer bytes may look like poison by chance.
constexpr std::size_t kTellingBytes = 8;

bool is_poison(const at::Tensor& t) {
  const auto* bytes = static_cast<const unsigned char*>(t.const_data_ptr());
  return t.nbytes() >= kTellingBytes &&
         std::all_of(bytes, bytes + t.nbytes(), [](unsigned char b) { return b == kPoison; });
}

at::Tensor new_host(const at::Tensor& like) {
  return at::Tensor(at::detail::empty_cpu(like.sizes(), like.scalar_type()));
}

}  // namespace

class FakeDevices::Point final : public Mark {
 public:
  Point(std::shared_ptr<FakeDevices> devices, Name stream)
      : devices_(std::move(devices)), stream_(stream), at_(devices_->streams_[stream].enqueued) {}

  // A step of work for each question, and never at the first: devices take their time.
  bool reached() override {
    const std::lock_guard lock(devices_->mutex_);
    devices_->may_fail("query of an event", false);
    if (!std::exchange(asked_, true)) return false;
    if (!passed() && !devices_->step(stream_)) devices_->step(kCaller);
    if (passed() && !std::exchange(said_, true))
      devices_->trace_.emplace_back(stream_ == kCaller ? "arrived" : "landed");
    return passed();
  }

  // The caller then looks at its tensors as no caller of CUDA could: its stream runs empty.
  void hold_current() override {
    const std::lock_guard lock(devices_->mutex_);
    devices_->may_fail("wait for an event", true);
    devices_->trace_.emplace_back("join");
    devices_->enqueue(kCaller, [all = devices_.get(), stream = stream_, at = at_] {
      return all->advance(stream, at);
    });
    devices_->advance(kCaller, devices_->streams_[kCaller].enqueued);
  }

  bool passed() const { return devices_->streams_[stream_].done >= at_; }
  std::size_t at() const { return at_; }

 private:
  const std::shared_ptr<FakeDevices> devices_;
  const Name stream_;
  const std::size_t at_;
  bool asked_ = false, said_ = false;
};

void FakeDevices::may_fail(const char* call, bool in_capture) {
  if (fail_in_ >= 0 && fail_in_-- == 0)
    throw std::runtime_error(text("CUDA error: made up, in ", call));
  if (in_capture && captured_)
    throw std::runtime_error(text("CUDA error: ", call, " while the stream is capturing"));
}

void FakeDevices::enqueue(Name stream, std::function<bool()> work) {
  streams_[stream].work.push_back(std::move(work));
  ++streams_[stream].enqueued;
}

bool FakeDevices::step(Name stream) {
  Stream& s = streams_[stream];
  if (s.work.empty() || (stream == kCaller && stalled_)) return false;
  if (!s.work.front()()) return false;
  s.work.pop_front();
  ++s.done;
  return true;
}

bool FakeDevices::advance(Name stream, std::size_t to) {
  while (streams_[stream].done < to)
    if (!step(stream)) return false;
  return true;
}

bool FakeDevices::serves(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return tensor.is_cpu() && std::none_of(on_host_.begin(), on_host_.end(), [&](const auto& s) {
           return s.is_alias_of(tensor.storage());
         });
}

bool FakeDevices::is_capturing(at::Device) {
  const std::lock_guard lock(mutex_);
  return captured_;
}

at::Tensor FakeDevices::new_pinned(const at::Tensor& like) {
  const std::lock_guard lock(mutex_);
  may_fail("allocation of pinned memory", true);
  at::Tensor host = new_host(like);
  std::memset(host.mutable_data_ptr(), kPoison, host.nbytes());
  return host;
}

void FakeDevices::copy_out(const Way& way) {
  const std::lock_guard lock(mutex_);
  may_fail("copy to the host", true);
  trace_.emplace_back("copy_out");
  leaving_.insert(way.host.const_data_ptr());
  enqueue(kCaller, [this, way] {
    lay(way.host, way.tensor);
    leaving_.erase(way.host.const_data_ptr());
    return true;
  });
}

std::unique_ptr<Mark> FakeDevices::mark(at::Device) {
  const std::lock_guard lock(mutex_);
  may_fail("record of an event", true);
  trace_.emplace_back("mark");
  return std::make_unique<Point>(shared_from_this(), kCaller);
}

// The host memory is read now, as it might be: whoever sends it before it is complete loses.
std::unique_ptr<Mark> FakeDevices::copy_back(at::Device, const std::vector<Way>& ways,
                                             Mark& after) {
  const std::lock_guard lock(mutex_);
  may_fail("copy from the host", false);
  const std::size_t at = static_cast<Point&>(after).at();
  enqueue(kBack, [this, at] { return streams_[kCaller].done >= at; });
  for (const Way& way : ways) {
    trace_.emplace_back("copy_back");
    if (leaving_.contains(way.host.const_data_ptr()))
      throw std::logic_error("pinned memory was sent back before it had come");
    if (is_poison(way.host))
      throw std::logic_error("pinned memory was sent back before anything was written there");
    at::Tensor now = new_host(way.host);
    std::memcpy(now.mutable_data_ptr(), way.host.const_data_ptr(), now.nbytes());
    enqueue(kBack, [tensor = way.tensor, now] {
      lay(tensor, now);
      return true;
    });
  }
  if (eager_) advance(kBack, streams_[kBack].enqueued);
  return std::make_unique<Point>(shared_from_this(), kBack);
}

void FakeDevices::with_results(c10::ArrayRef<at::Device>, c10::function_ref<void()> act) {
  {
    // torch's future of CPU tensors has no streams to wait on: whoever waits for it looks at once.
    const std::lock_guard lock(mutex_);
    advance(kCaller, streams_[kCaller].enqueued);
    advance(kBack, streams_[kBack].enqueued);
  }
  act();
}

void FakeDevices::put_on_host(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  on_host_.push_back(tensor.storage());
}

void FakeDevices::fill_later(const at::Tensor& tensor, double value) {
  const std::lock_guard lock(mutex_);
  at::Tensor values = new_host(tensor);
  values.fill_(value);
  enqueue(kCaller, [tensor, values] {
    lay(tensor, values);
    return true;
  });
}

void FakeDevices::stall(bool on) {
  const std::lock_guard lock(mutex_);
  stalled_ = on;
}
void FakeDevices::capture(bool on) {
  const std::lock_guard lock(mutex_);
  captured_ = on;
}
void FakeDevices::fail_call(int in) {
  const std::lock_guard lock(mutex_);
  fail_in_ = in;
}

std::vector<std::string> FakeDevices::trace() const {
  const std::lock_guard lock(mutex_);
  return trace_;
}

}  // namespace pycollect::dist
