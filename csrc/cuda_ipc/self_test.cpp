#include "self_test.h"

#include <algorithm>
#include <thread>

#include "../bootstrap/store.h"
#include "../plan/error.h"

namespace pycollect::cuda_ipc {
namespace {

// Time limit of one test: it takes microseconds, or longer if a first launch loads its kernel.
constexpr std::chrono::seconds kTimeLimit(10);
constexpr std::chrono::microseconds kPollInterval(20);

// Numbers of the patterns in a staging buffer: written by rank r, read from rank r, and the
// owner's.
constexpr int written_by(Rank r) { return r; }
constexpr int read_from(Rank r) { return ipc::kMaxRanks + r; }
constexpr int kOwn = 2 * ipc::kMaxRanks;

// Value of the bytes of a rank's pattern, which no failure leaves there by chance.
constexpr unsigned char pattern_byte(Rank r) { return static_cast<unsigned char>(0x80 + r); }

// Counter values of the self-test, stored by streams and by the host: lower than those of any run.
constexpr uint64_t kSignalled = 1, kReleased = 2;

}  // namespace

SelfTest::SelfTest(CudaIpcMemory& gpu, const StagingBuffer& staging_buffer,
                   const SignalPad& signal_pad, std::byte* registered)
    : gpu_(gpu),
      staging_buffer_(staging_buffer),
      signal_pad_(signal_pad),
      registered_(registered),
      stream_(gpu.on(staging_buffer.device(),
                     [&](cuda::Api& api) { return api.create_stream(staging_buffer.device()); })) {}

bool SelfTest::drain() noexcept {
  if (stuck_) return false;
  try {
    for (Rank r = 0; r < staging_buffer_.world(); ++r)
      signal_pad_.counter(r).reached.store(kReleased, std::memory_order_seq_cst);
    finish();
  } catch (...) {  // after any error the memory must not be freed
    stuck_ = true;
  }
  return !stuck_;
}

SelfTest::~SelfTest() {
  if (!drain()) {
    static_cast<void>(found_.release());  // the device may still write there
    return;                               // and destroying the stream would wait for it
  }
  try {
    on_stream([&](cuda::Api& api) { api.destroy(stream_); });
  } catch (...) {  // the device is broken
  }
}

void SelfTest::finish() {
  bool reached = false;
  on_stream([&](cuda::Api& api) {
    const Event end = api.create_event(stream_.device);
    const std::shared_ptr<void> destroyed(nullptr, [&](void*) { api.destroy(end); });
    api.record(end, stream_);
    const auto deadline = ipc::Clock::now() + kTimeLimit;
    while (!(reached = api.query(end)) && ipc::Clock::now() < deadline)
      std::this_thread::sleep_for(kPollInterval);
  });
  if (!reached) throw std::runtime_error("the GPU did not finish a self-test within 10 seconds");
}

void SelfTest::copy(std::byte* dst, std::byte* src) {
  on_stream([&](cuda::Api& api) {
    api.launch(stream_,
               {.works = {{.dsts = {dst}, .srcs = {src}, .count = StagingBuffer::kPatternBytes}},
                .dtype = DType::u8,
                .op = ReduceOp::sum,
                .options = {}});
  });
}

void SelfTest::wait(Rank r, uint64_t value) {
  on_stream([&](cuda::Api& api) { api.wait_value(stream_, word(r), value); });
}

void SelfTest::clear() {
  const Rank me = staging_buffer_.rank();
  on_stream([&](cuda::Api& api) {
    api.fill(stream_, staging_buffer_.pattern(me, 0), 0, kOwn * StagingBuffer::kPatternBytes);
    api.fill(stream_, staging_buffer_.pattern(me, kOwn), pattern_byte(me),
             StagingBuffer::kPatternBytes);
  });
  finish();
}

void SelfTest::write_to_all() {
  const Rank me = staging_buffer_.rank();
  for (Rank r = 0; r < staging_buffer_.world(); ++r)
    copy(staging_buffer_.pattern(r, written_by(me)), staging_buffer_.pattern(me, kOwn));
  finish();
}

void SelfTest::read_from_all() {
  const Rank me = staging_buffer_.rank();
  for (Rank r = 0; r < staging_buffer_.world(); ++r)
    copy(staging_buffer_.pattern(me, read_from(r)), staging_buffer_.pattern(r, kOwn));
  finish();  // a copy to unpinned memory makes the host wait for the stream without a limit
  found_ = std::make_unique<Patterns>(kOwn * StagingBuffer::kPatternBytes);
  Patterns& found = *found_;
  on_stream([&](cuda::Api& api) {
    const auto bytes = static_cast<std::ptrdiff_t>(found.size());
    api.copy(stream_, {.dst = found.data(),
                       .src = staging_buffer_.pattern(me, 0),
                       .dst_pitch = bytes,
                       .src_pitch = bytes,
                       .bytes = found.size(),
                       .rows = 1,
                       .dst_device = cuda::kHost,
                       .src_device = staging_buffer_.device()});
  });
  finish();
  const auto has_pattern = [&](int number, Rank r) {
    const auto first =
        found.begin() + number * static_cast<std::ptrdiff_t>(StagingBuffer::kPatternBytes);
    return std::all_of(first, first + StagingBuffer::kPatternBytes,
                       [&](std::byte byte) { return byte == std::byte{pattern_byte(r)}; });
  };
  for (Rank r = 0; r < staging_buffer_.world(); ++r) {
    if (!has_pattern(written_by(r), r))
      throw std::runtime_error(text("the self-test pattern that rank ", r,
                                    " wrote into this rank's GPU memory has not arrived"));
    if (!has_pattern(read_from(r), r))
      throw std::runtime_error(
          text("the self-test pattern read from rank ", r, "'s GPU memory is wrong"));
  }
}

void SelfTest::signal_all() {
  on_stream(
      [&](cuda::Api& api) { api.write_value(stream_, word(staging_buffer_.rank()), kSignalled); });
  finish();
}

void SelfTest::wait_for_all() {
  for (Rank r = 0; r < staging_buffer_.world(); ++r) wait(r, kSignalled);
  finish();
  wait(staging_buffer_.rank(), kReleased);
  signal_pad_.counter(staging_buffer_.rank()).reached.store(kReleased, std::memory_order_seq_cst);
  finish();
}

}  // namespace pycollect::cuda_ipc
