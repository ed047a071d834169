// See fake_devices.h.
#include "fake_devices.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "../../plan/error.h"
#include "../../torch/threads.h"

namespace pycollect::dist {
namespace {

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
  Point(std::shared_ptr<FakeDevices> devices, std::size_t stream)
      : devices_(std::move(devices)), stream_(stream), at_(devices_->streams_->enqueued(stream)) {}

  // A step of work for each question, and never at the first: devices take their time.
  bool reached() override {
    const std::lock_guard lock(devices_->mutex_);
    devices_->may_fail("query of an event", false);
    if (!std::exchange(asked_, true)) return false;
    FakeStreams& streams = *devices_->streams_;
    if (!passed() && !streams.step(stream_)) streams.step(FakeStreams::kCaller);
    if (passed() && !std::exchange(said_, true))
      devices_->trace_.emplace_back(stream_ == FakeStreams::kCaller ? "arrived" : "landed");
    return passed();
  }

  // The caller then looks at its tensors as no caller of CUDA could: its stream runs empty.
  void hold_current(at::Device) override {
    bool looks = false;
    std::size_t current = FakeStreams::kCaller;
    {
      const std::lock_guard lock(devices_->mutex_);
      devices_->may_fail("wait for an event", true);
      devices_->trace_.emplace_back("join");
      current = devices_->current();
      hold(current);
      looks = devices_->looks_;
    }
    if (looks) devices_->streams_->drain(current);
  }

  void hold(std::size_t other) {
    devices_->streams_->enqueue(other, [streams = devices_->streams_.get(), stream = stream_,
                                        at = at_] { return streams->advance(stream, at); });
  }

 private:
  bool passed() const { return devices_->streams_->done(stream_) >= at_; }

  const std::shared_ptr<FakeDevices> devices_;
  const std::size_t stream_;
  const std::size_t at_;
  bool asked_ = false, said_ = false;
};

FakeDevices::FakeDevices(bool eager, bool slabs)
    : streams_(std::make_shared<FakeStreams>(eager)),
      gpu_(slabs ? std::make_shared<FakeGpu>(streams_) : nullptr),
      mutex_(streams_->mutex) {}

void FakeDevices::may_fail(const char* call, bool in_capture) {
  if (fail_in_ >= 0 && fail_in_-- == 0)
    throw std::runtime_error(text("CUDA error: made up, in ", call));
  if (in_capture && captured_)
    throw std::runtime_error(text("CUDA error: ", call, " while the stream is capturing"));
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
  may_fail("allocation of pinned memory", false);
  ++pinned_;
  at::Tensor host = new_host(like);
  std::memset(host.mutable_data_ptr(), kPoison, host.nbytes());
  return host;
}

void FakeDevices::copy_out(const Way& way) {
  const std::lock_guard lock(mutex_);
  may_fail("copy to the host", true);
  require_kept(way.tensor);
  trace_.emplace_back("copy_out");
  leaving_.insert(way.dense.const_data_ptr());
  streams_->enqueue(current(), [this, way] {
    lay(way.dense, way.tensor);
    leaving_.erase(way.dense.const_data_ptr());
    return true;
  });
}

void FakeDevices::compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) {
  const std::lock_guard lock(mutex_);
  may_fail("launch", true);
  require_kept(into);
  require_kept(from);
  streams_->enqueue(current(), [into, from, how] {
    how(into);
    return true;
  });
}

std::unique_ptr<Mark> FakeDevices::mark(at::Device) {
  const std::lock_guard lock(mutex_);
  may_fail("record of an event", true);
  trace_.emplace_back("mark");
  return std::make_unique<Point>(shared_from_this(), current());
}

void FakeDevices::follow(at::Device, Mark& after) { follow_on(FakeStreams::kGroup, after); }

void FakeDevices::follow_on(std::size_t stream, Mark& after) {
  const std::lock_guard lock(mutex_);
  static_cast<Point&>(after).hold(stream);
}

slabs::Stream FakeDevices::stream(at::Device device) {
  return {device.index(), reinterpret_cast<void*>(FakeStreams::kGroup)};
}

at::Tensor FakeDevices::new_dense(const at::Tensor& like, at::Device) {
  at::Tensor made = new_host(like);
  std::memset(made.mutable_data_ptr(), kPoison, made.nbytes());
  return made;
}

// Whatever the device is called, there is one, the CPU tensors'.
at::Tensor FakeDevices::new_in_tract(const std::shared_ptr<slabs::Tracts>& tracts, at::Device,
                                     int64_t count, at::ScalarType type) {
  const auto bytes = static_cast<std::size_t>(count) * at::elementSize(type);
  const slabs::Device device = at::Device(at::kCPU).index();
  std::byte* const memory = tracts->add(device, std::max<std::size_t>(bytes, 1));
  return at::from_blob(
      memory, {count}, [tracts, memory](void*) { tracts->give_back(memory); },
      at::TensorOptions(type));
}

// Pinned memory is read now, as it might be: whoever sends it before it is complete loses. What is
// on the device is read in its turn.
std::unique_ptr<Mark> FakeDevices::finish_on(std::size_t stream, const std::vector<Way>& ways,
                                             const std::vector<at::Tensor>& kept) {
  const std::lock_guard lock(mutex_);
  may_fail("copy from the host", false);
  for (const Way& way : ways) {
    trace_.emplace_back("copy_back");
    const bool on_device = std::any_of(kept.begin(), kept.end(), [&](const at::Tensor& t) {
      return t.const_data_ptr() == way.dense.const_data_ptr();
    });
    at::Tensor now = way.dense;
    if (!on_device) {
      if (leaving_.contains(way.dense.const_data_ptr()))
        throw std::logic_error("pinned memory was sent back before it had come");
      if (is_poison(way.dense))
        throw std::logic_error("pinned memory was sent back before anything was written there");
      now = new_host(way.dense);
      std::memcpy(now.mutable_data_ptr(), way.dense.const_data_ptr(), now.nbytes());
    }
    streams_->enqueue(stream, [tensor = way.tensor, now] {
      lay(tensor, now);
      return true;
    });
  }
  // Memory that is given back while the stream still has to do with it is given to somebody else.
  if (!kept.empty()) streams_->enqueue(stream, [kept] { return !kept.empty(); });
  std::erase_if(kept_, [](const auto& old) { return old.second.expired(); });
  for (const at::Tensor& t : kept) kept_.emplace_back(stream, t.storage().getWeakStorageImpl());
  if (streams_->eager()) streams_->advance(stream, streams_->enqueued(stream));
  return std::make_unique<Point>(shared_from_this(), stream);
}

std::unique_ptr<Mark> FakeDevices::finish(at::Device, const std::vector<Way>& ways,
                                          const std::vector<at::Tensor>& kept) {
  return finish_on(FakeStreams::kGroup, ways, kept);
}

void FakeDevices::put_on_host(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  on_host_.push_back(tensor.storage());
}

void FakeDevices::fill_later(const at::Tensor& tensor, double value) {
  const std::lock_guard lock(mutex_);
  at::Tensor values = new_host(tensor);
  values.fill_(value);
  streams_->enqueue(current(), [tensor, values] {
    lay(tensor, values);
    return true;
  });
}

void FakeDevices::use_second_stream(bool on) {
  const std::lock_guard lock(mutex_);
  if (second_ == FakeStreams::kCaller) second_ = streams_->add();
  current_ = on ? second_ : FakeStreams::kCaller;
}

void FakeDevices::finish_caller() { streams_->drain(FakeStreams::kCaller); }

void FakeDevices::stall(bool on, int after) {
  const std::lock_guard lock(mutex_);
  streams_->stall(on, after);
}
void FakeDevices::capture(bool on) {
  const std::lock_guard lock(mutex_);
  captured_ = on;
}
void FakeDevices::look(bool on) {
  const std::lock_guard lock(mutex_);
  looks_ = on;
}
void FakeDevices::fail_call(int in) {
  const std::lock_guard lock(mutex_);
  fail_in_ = in;
}

int FakeDevices::pinned() const {
  const std::lock_guard lock(mutex_);
  return pinned_;
}

std::vector<std::string> FakeDevices::trace() const {
  const std::lock_guard lock(mutex_);
  return trace_;
}

}  // namespace pycollect::dist
