#include "self_test.h"

#include <algorithm>
#include <thread>

#include "../bootstrap/store.h"
#include "../plan/error.h"

namespace pycollect::cuda_ipc {
namespace {

// Time limit of one test: it takes microseconds, or longer if a first launch loads its kernel.
constexpr std::chrono::seconds kLongest(10);
constexpr std::chrono::microseconds kPollInterval(20);

// Numbers of the marks in a staging buffer: written by rank r, read from rank r, and the owner's.
constexpr int written_by(Rank r) { return r; }
constexpr int read_of(Rank r) { return shm::kMaxRanks + r; }
constexpr int kOwn = 2 * shm::kMaxRanks;

// Value of the bytes of a rank's mark, which no failure leaves there by chance.
constexpr unsigned char pattern(Rank r) { return static_cast<unsigned char>(0x80 + r); }

// Counter values of the self-test, stored by streams and by the host: lower than those of any run.
constexpr uint64_t kSignalled = 1, kReleased = 2;

}  // namespace

SelfTest::SelfTest(IpcGpu& gpu, const StagingBuffer& staging_buffer, const SignalPad& signal_pad,
                   std::byte* registered)
    : gpu_(gpu),
      staging_buffer_(staging_buffer),
      signal_pad_(signal_pad),
      registered_(registered),
      stream_(gpu.on(staging_buffer.device(),
                     [&](cuda::Api& api) { return api.create_stream(staging_buffer.device()); })) {}

bool SelfTest::drain() noexcept {
  if (lost_) return false;
  try {
    for (Rank r = 0; r < staging_buffer_.world(); ++r)
      signal_pad_.counter(r).reached.store(kReleased, std::memory_order_seq_cst);
    finish();
  } catch (...) {  // after any error the memory must not be freed
    lost_ = true;
  }
  return !lost_;
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
    const auto deadline = shm::Clock::now() + kLongest;
    while (!(reached = api.query(end)) && shm::Clock::now() < deadline)
      std::this_thread::sleep_for(kPollInterval);
  });
  if (!reached) throw std::runtime_error("the GPU did not finish a self-test within 10 seconds");
}

void SelfTest::copy(std::byte* dst, std::byte* src) {
  on_stream([&](cuda::Api& api) {
    api.launch(stream_,
               {.rows = {{.dsts = {dst}, .srcs = {src}, .count = StagingBuffer::kMarkBytes}},
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
    api.fill(stream_, staging_buffer_.mark(me, 0), 0, kOwn * StagingBuffer::kMarkBytes);
    api.fill(stream_, staging_buffer_.mark(me, kOwn), pattern(me), StagingBuffer::kMarkBytes);
  });
  finish();
}

void SelfTest::write_to_all() {
  const Rank me = staging_buffer_.rank();
  for (Rank r = 0; r < staging_buffer_.world(); ++r)
    copy(staging_buffer_.mark(r, written_by(me)), staging_buffer_.mark(me, kOwn));
  finish();
}

void SelfTest::read_from_all() {
  const Rank me = staging_buffer_.rank();
  for (Rank r = 0; r < staging_buffer_.world(); ++r)
    copy(staging_buffer_.mark(me, read_of(r)), staging_buffer_.mark(r, kOwn));
  finish();  // a copy to unpinned memory makes the host wait for the stream without a limit
  found_ = std::make_unique<Marks>(kOwn * StagingBuffer::kMarkBytes);
  Marks& found = *found_;
  on_stream([&](cuda::Api& api) {
    const auto bytes = static_cast<std::ptrdiff_t>(found.size());
    api.copy(stream_, {.dst = found.data(),
                       .src = staging_buffer_.mark(me, 0),
                       .dst_pitch = bytes,
                       .src_pitch = bytes,
                       .bytes = found.size(),
                       .rows = 1,
                       .dst_device = cuda::kHost,
                       .src_device = staging_buffer_.device()});
  });
  finish();
  const auto is = [&](int number, Rank r) {
    const auto first =
        found.begin() + number * static_cast<std::ptrdiff_t>(StagingBuffer::kMarkBytes);
    return std::all_of(first, first + StagingBuffer::kMarkBytes,
                       [&](std::byte byte) { return byte == std::byte{pattern(r)}; });
  };
  for (Rank r = 0; r < staging_buffer_.world(); ++r) {
    if (!is(written_by(r), r))
      throw std::runtime_error(text("the mark that rank ", r, " wrote here has not arrived"));
    if (!is(read_of(r), r))
      throw std::runtime_error(text("the mark read from rank ", r, "'s GPU memory is wrong"));
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
