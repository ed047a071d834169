#include "self_test.h"

#include <algorithm>
#include <thread>

#include "../bootstrap/store.h"
#include "../group/new_thread.h"
#include "../plan/error.h"

namespace pycollect::cuda_ipc {
namespace {

// Time limit of one test: it takes microseconds, or longer if a first launch loads its kernel.
constexpr std::chrono::seconds kTimeLimit(10);
constexpr std::chrono::microseconds kPollInterval(20);
// Time after which the host counts as blocked while it enqueues: it needs microseconds.
constexpr std::chrono::milliseconds kBlocked(100);

// Numbers of the patterns in a staging buffer: written by rank r, read from rank r, and the
// owner's.
constexpr int written_by(Rank r) { return r; }
constexpr int read_from(Rank r) { return ipc::kMaxRanks + r; }
constexpr int kOwn = 2 * ipc::kMaxRanks;

// Value of the bytes of a rank's pattern, which no failure leaves there by chance.
constexpr unsigned char pattern_byte(Rank r) { return static_cast<unsigned char>(0x80 + r); }

// Counter values of the self-test, stored by streams and by the host: lower than those of any run.
constexpr uint64_t kSignalled = 1, kReleased = 2;

void launch_copy(cuda::Api& api, Stream stream, std::byte* dst, std::byte* src) {
  api.launch(stream,
             {.works = {{.dsts = {dst}, .srcs = {src}, .count = StagingBuffer::kPatternBytes}},
              .dtype = DType::u8,
              .op = ReduceOp::sum,
              .options = {}});
}

}  // namespace

SelfTest::SelfTest(std::shared_ptr<CudaIpcMemory> gpu, const StagingBuffer& staging_buffer,
                   const SignalPad& signal_pad, std::byte* registered)
    : gpu_(std::move(gpu)),
      staging_buffer_(staging_buffer),
      signal_pad_(signal_pad),
      registered_(registered),
      stream_(gpu_->on(staging_buffer.device(), [&](cuda::Api& api) {
        return api.create_stream(staging_buffer.device());
      })) {}

// Releases the streams of all ranks from whatever they wait for.
void SelfTest::release() const noexcept {
  for (Rank r = 0; r < staging_buffer_.world(); ++r)
    signal_pad_.counter(r).reached.store(kReleased, std::memory_order_seq_cst);
}

bool SelfTest::drain() noexcept {
  if (stuck_) return false;
  try {
    release();
    finish();
  } catch (...) {  // after any error the memory must not be freed
    stuck_ = true;
  }
  return !stuck_;
}

SelfTest::~SelfTest() {
  if (!drain()) {
    static_cast<void>(found_.release());  // the device may still write there
    if (enqueuer_.joinable()) enqueuer_.detach();
    return;  // destroying the stream would wait for it
  }
  try {
    on_stream([&](cuda::Api& api) { api.destroy(stream_); });
  } catch (...) {  // the device is broken
  }
}

// Begins to enqueue work, in a thread of its own: the host may be blocked until the stream's wait
// has ended, as it is by launches with CUDA_LAUNCH_BLOCKING=1. Returns when the work is enqueued,
// or the host is blocked. `act` must not refer to this object.
void SelfTest::begin_enqueue(std::function<void(cuda::Api&)> act) {
  std::packaged_task<void()> task(
      [gpu = gpu_, device = stream_.device, act = std::move(act)] { gpu->on(device, act); });
  enqueued_ = task.get_future();
  enqueuer_ = ipc::new_thread_without_signals([task = std::move(task)]() mutable { task(); });
  enqueued_.wait_for(kBlocked);
}

void SelfTest::end_enqueue() {
  if (!enqueuer_.joinable()) return;
  if (enqueued_.wait_for(kTimeLimit) != std::future_status::ready) {
    release();  // now, because a host that is blocked keeps all ranks waiting
    throw std::runtime_error("the host was blocked for 10 seconds in enqueueing a self-test");
  }
  enqueuer_.join();
  enqueued_.get();
}

void SelfTest::finish() {
  end_enqueue();
  bool reached = false;
  on_stream([&](cuda::Api& api) {
    const Event end = api.create_event(stream_.device);
    const std::shared_ptr<void> destroyed(nullptr, [&](void*) { api.destroy(end); });
    api.record(end, stream_);
    const auto deadline = ipc::Clock::now() + kTimeLimit;
    while (!(reached = api.query(end)) && ipc::Clock::now() < deadline)
      std::this_thread::sleep_for(kPollInterval);
    if (!reached) release();  // now, because a GPU that is occupied may keep all ranks waiting
  });
  if (!reached) throw std::runtime_error("the GPU did not finish a self-test within 10 seconds");
}

void SelfTest::copy(std::byte* dst, std::byte* src) {
  on_stream([&](cuda::Api& api) { launch_copy(api, stream_, dst, src); });
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

void SelfTest::block_streams() {
  const Rank me = staging_buffer_.rank();
  if (me == 0) return;
  begin_enqueue([stream = stream_, first = word(0),
                 dst = staging_buffer_.pattern(me, read_from(me)),
                 src = staging_buffer_.pattern(me, kOwn)](cuda::Api& api) {
    api.wait_value(stream, first, kSignalled);
    launch_copy(api, stream, dst, src);
  });
}

void SelfTest::signal_all() {
  const Rank me = staging_buffer_.rank();
  end_enqueue();
  copy(staging_buffer_.pattern(me, read_from(me)), staging_buffer_.pattern(me, kOwn));
  on_stream([&](cuda::Api& api) { api.write_value(stream_, word(me), kSignalled); });
  finish();
}

void SelfTest::wait_for_all() {
  const Rank me = staging_buffer_.rank();
  std::vector<std::byte*> words;
  for (Rank r = 0; r < staging_buffer_.world(); ++r) words.push_back(word(r));
  begin_enqueue([stream = stream_, words](cuda::Api& api) {
    for (std::byte* at : words) api.wait_value(stream, at, kSignalled);
  });
  finish();
  begin_enqueue([stream = stream_, own = word(me)](cuda::Api& api) {
    api.wait_value(stream, own, kReleased);
  });
  signal_pad_.counter(me).reached.store(kReleased, std::memory_order_seq_cst);
  finish();
}

}  // namespace pycollect::cuda_ipc
