#include "trial.h"

#include <algorithm>
#include <thread>

#include "../plan/error.h"
#include "../shm/board.h"

namespace pycollect::slabs {
namespace {

// What works takes microseconds, but for a first launch, which may load its kernel.
constexpr std::chrono::seconds kLongest(10);
constexpr std::chrono::microseconds kGlance(20);

// Of a slab's marks: those that the ranks have written there, what this rank has read of each, and
// what it gives them.
constexpr int written_by(Rank r) { return r; }
constexpr int read_of(Rank r) { return shm::kMostRanks + r; }
constexpr int kOwn = 2 * shm::kMostRanks;

// Bytes that no failure leaves by chance.
constexpr unsigned char pattern(Rank r) { return static_cast<unsigned char>(0x80 + r); }

// The counters' values: said by the streams, and by the host. Less than those of any run.
constexpr uint64_t kTold = 1, kReleased = 2;

}  // namespace

Trial::Trial(Gpu& gpu, const Slab& slab, const Deck& deck, std::byte* adopted)
    : gpu_(gpu),
      slab_(slab),
      deck_(deck),
      adopted_(adopted),
      stream_(gpu.on(slab.device(),
                     [&](cuda::Api& api) { return api.create_stream(slab.device()); })) {}

bool Trial::drain() noexcept {
  if (lost_) return false;
  try {
    for (Rank r = 0; r < slab_.world(); ++r)
      deck_.counter(r).reached.store(kReleased, std::memory_order_seq_cst);
    finish();
  } catch (...) {  // whatever it is, the memory is not to be let go of
    lost_ = true;
  }
  return !lost_;
}

Trial::~Trial() {
  if (!drain()) {
    static_cast<void>(found_.release());  // the device may still write there
    return;                               // and to destroy the stream would wait for it
  }
  try {
    on_stream([&](cuda::Api& api) { api.destroy(stream_); });
  } catch (...) {  // the device is broken
  }
}

void Trial::finish() {
  bool reached = false;
  on_stream([&](cuda::Api& api) {
    const Event end = api.create_event(stream_.device);
    const std::shared_ptr<void> destroyed(nullptr, [&](void*) { api.destroy(end); });
    api.record(end, stream_);
    const auto deadline = shm::Clock::now() + kLongest;
    while (!(reached = api.query(end)) && shm::Clock::now() < deadline)
      std::this_thread::sleep_for(kGlance);
  });
  if (!reached) throw std::runtime_error("the GPU did not come to an end within 10 seconds");
}

void Trial::copy(std::byte* dst, std::byte* src) {
  on_stream([&](cuda::Api& api) {
    api.launch(stream_, {.rows = {{.dsts = {dst}, .srcs = {src}, .count = Slab::kMarkBytes}},
                         .dtype = DType::u8,
                         .op = ReduceOp::sum,
                         .options = {}});
  });
}

void Trial::wait(Rank r, uint64_t value) {
  on_stream([&](cuda::Api& api) { api.wait_value(stream_, word(r), value); });
}

void Trial::clear() {
  const Rank me = slab_.rank();
  on_stream([&](cuda::Api& api) {
    api.fill(stream_, slab_.mark(me, 0), 0, kOwn * Slab::kMarkBytes);
    api.fill(stream_, slab_.mark(me, kOwn), pattern(me), Slab::kMarkBytes);
  });
  finish();
}

void Trial::write_everywhere() {
  const Rank me = slab_.rank();
  for (Rank r = 0; r < slab_.world(); ++r)
    copy(slab_.mark(r, written_by(me)), slab_.mark(me, kOwn));
  finish();
}

void Trial::read_everywhere() {
  const Rank me = slab_.rank();
  for (Rank r = 0; r < slab_.world(); ++r) copy(slab_.mark(me, read_of(r)), slab_.mark(r, kOwn));
  finish();  // a copy to memory that is not pinned has the host wait for the stream without a limit
  found_ = std::make_unique<Found>(kOwn * Slab::kMarkBytes);
  Found& found = *found_;
  on_stream([&](cuda::Api& api) {
    const auto bytes = static_cast<std::ptrdiff_t>(found.size());
    api.copy(stream_, {.dst = found.data(),
                       .src = slab_.mark(me, 0),
                       .dst_pitch = bytes,
                       .src_pitch = bytes,
                       .bytes = found.size(),
                       .rows = 1,
                       .dst_device = cuda::kHost,
                       .src_device = slab_.device()});
  });
  finish();
  const auto is = [&](int number, Rank r) {
    const auto first = found.begin() + number * static_cast<std::ptrdiff_t>(Slab::kMarkBytes);
    return std::all_of(first, first + Slab::kMarkBytes,
                       [&](std::byte byte) { return byte == std::byte{pattern(r)}; });
  };
  for (Rank r = 0; r < slab_.world(); ++r) {
    if (!is(written_by(r), r))
      throw std::runtime_error(text("what rank ", r, " wrote here has not arrived"));
    if (!is(read_of(r), r))
      throw std::runtime_error(text("what was read from rank ", r, " is not what it has there"));
  }
}

void Trial::tell() {
  on_stream([&](cuda::Api& api) { api.write_value(stream_, word(slab_.rank()), kTold); });
  finish();
}

void Trial::await_everybody() {
  for (Rank r = 0; r < slab_.world(); ++r) wait(r, kTold);
  finish();
  wait(slab_.rank(), kReleased);
  deck_.counter(slab_.rank()).reached.store(kReleased, std::memory_order_seq_cst);
  finish();
}

}  // namespace pycollect::slabs
