// See fake_gpu.h. A counter's second word is a note of what streams have been told to write there,
// from which the rule is checked that nobody waits for what nobody will write.
#include "fake_gpu.h"

#include <cstring>

#include "../../cpu/step_runner.h"
#include "../../plan/error.h"
#include "../../shm/layout.h"

namespace pycollect::dist {
namespace {

using slabs::Device;
using slabs::Event;
using slabs::Launch;
using slabs::Stream;

constexpr std::size_t kNote = 8;  // behind a counter's word

void fold(const Launch& launch) {
  if (launch.guard != nullptr &&
      reinterpret_cast<const std::atomic<uint32_t>*>(launch.guard)->load() != 0)
    return;
  const cpu::RowRunner runner(launch.dtype, launch.op, launch.options);
  for (const cuda::Row& row : launch.rows) {
    const std::vector<void*> dsts(row.dsts.begin(), row.dsts.end());
    const std::vector<void*> srcs(row.srcs.begin(), row.srcs.end());
    runner.run(row.finishes, {dsts.data(), static_cast<int>(dsts.size())},
               {srcs.data(), static_cast<int>(srcs.size())}, row.count, false);
  }
}

}  // namespace

struct FakeGpu::Point {
  std::size_t stream, at;
};

bool FakeGpu::enter(const char* call) {
  ++books_[call];
  if (const auto found = failing_.find(call); found != failing_.end() && found->second-- <= 0)
    throw std::runtime_error(text("CUDA error: made up, in ", call));
  return !dropped_.contains(call);
}

void FakeGpu::foul(const std::string& what) {
  fouls_.push_back(what);
  throw std::logic_error(what);
}

std::size_t FakeGpu::index(Stream stream) { return reinterpret_cast<std::size_t>(stream.handle); }

std::string FakeGpu::identity(Device) {
  const std::lock_guard lock(streams_->mutex);
  enter("identity");
  return identity_;
}

std::byte* FakeGpu::adopt(Device, std::byte* memory, std::size_t bytes) {
  const std::lock_guard lock(streams_->mutex);
  enter("adopt");
  if (reinterpret_cast<std::uintptr_t>(memory) % kPage != 0 || bytes % kPage != 0)
    foul("only whole pages can be registered");
  adopted_[memory] = bytes;
  ++books_["adopted"];
  return memory;
}

void FakeGpu::forsake(Device, std::byte* memory) {
  const std::lock_guard lock(streams_->mutex);
  if (adopted_.erase(memory) == 0) foul("memory was unregistered that was not registered");
  --books_["adopted"];
}

bool FakeGpu::is_adopted(const std::byte* word) const {
  for (const auto& [base, bytes] : adopted_)
    if (word >= base && word < base + bytes) return true;
  return false;
}

Stream FakeGpu::new_stream(Device device) {
  const std::lock_guard lock(streams_->mutex);
  enter("new_stream");
  ++books_["streams"];
  return {device, reinterpret_cast<void*>(streams_->add())};
}

void FakeGpu::destroy(Stream) {
  const std::lock_guard lock(streams_->mutex);
  --books_["streams"];
}

Event FakeGpu::record(Stream stream) {
  const std::lock_guard lock(streams_->mutex);
  enter("record");
  ++books_["events"];
  const std::size_t s = index(stream);
  return {stream.device, new Point{s, streams_->enqueued(s)}};
}

bool FakeGpu::reached(Event event) {
  const std::lock_guard lock(streams_->mutex);
  enter("reached");
  const auto* point = static_cast<const Point*>(event.handle);
  if (streams_->done(point->stream) < point->at) streams_->step(point->stream);
  return streams_->done(point->stream) >= point->at;
}

void FakeGpu::destroy(Event event) {
  const std::lock_guard lock(streams_->mutex);
  --books_["events"];
  delete static_cast<const Point*>(event.handle);
}

void FakeGpu::write(Stream stream, std::byte* word, uint64_t value) {
  const std::lock_guard lock(streams_->mutex);
  if (!is_adopted(word)) foul("a stream was to write memory that is not registered");
  const bool done = enter("write");
  word_at(word + kNote).store(value);
  if (done)
    streams_->enqueue(index(stream), [word, value] {
      word_at(word).store(value);
      return true;
    });
}

void FakeGpu::await(Stream stream, std::byte* word, uint64_t value) {
  const std::lock_guard lock(streams_->mutex);
  if (!is_adopted(word)) foul("a stream was to wait for memory that is not registered");
  if (index(stream) == FakeStreams::kGroup && !shm::reached(word_at(word + kNote).load(), value))
    foul("a stream was to wait for what nobody has been told to write");
  if (enter("await"))
    streams_->enqueue(index(stream),
                      [word, value] { return shm::reached(word_at(word).load(), value); });
}

void FakeGpu::launch(Stream stream, const Launch& launch) {
  const std::lock_guard lock(streams_->mutex);
  if (enter("launch"))
    streams_->enqueue(index(stream), [launch] {
      fold(launch);
      return true;
    });
}

void FakeGpu::fill(Stream stream, std::byte* memory, unsigned char value, std::size_t bytes) {
  const std::lock_guard lock(streams_->mutex);
  if (enter("fill"))
    streams_->enqueue(index(stream), [=] {
      std::memset(memory, value, bytes);
      return true;
    });
}

void FakeGpu::read(Stream stream, void* host, const std::byte* memory, std::size_t bytes) {
  const std::lock_guard lock(streams_->mutex);
  const bool idle = streams_->done(index(stream)) == streams_->enqueued(index(stream));
  if (!idle) foul("the host was to wait for a stream without a limit");
  if (enter("read"))
    streams_->enqueue(index(stream), [=] {
      std::memcpy(host, memory, bytes);
      return true;
    });
}

void FakeGpu::fail(const std::string& call, int in) {
  const std::lock_guard lock(streams_->mutex);
  failing_.erase(call);
  if (in >= 0) failing_[call] = in;
}

void FakeGpu::drop(const std::string& call, bool on) {
  const std::lock_guard lock(streams_->mutex);
  dropped_.erase(call);
  if (on) dropped_.insert(call);
}

void FakeGpu::live_on(const std::string& gpu) {
  const std::lock_guard lock(streams_->mutex);
  identity_ = gpu;
}

void FakeGpu::pace(double seconds) {
  const std::lock_guard lock(streams_->mutex);
  streams_->pause_for(std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6)));
}

std::map<std::string, int> FakeGpu::books() const {
  const std::lock_guard lock(streams_->mutex);
  return books_;
}

std::vector<std::string> FakeGpu::fouls() const {
  const std::lock_guard lock(streams_->mutex);
  return fouls_;
}

}  // namespace pycollect::dist
