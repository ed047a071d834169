#include "threads.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

namespace pycollect {
namespace {

// forked_ is true in a forked child; it is set before fork() returns there.
std::atomic<bool> forked_{false};
[[maybe_unused]] const int fork_handler_registered =
    pthread_atfork(nullptr, nullptr, [] { forked_ = true; });

// Fewest grains per new thread: starting one for a single call costs about 50 us, so each thread
// must have much more work than that.
constexpr int64_t kGrainsPerThread = 64;

void on_new_threads(int64_t size, int64_t grain, const cpu::Body& body) {
  const int64_t most = std::min<int64_t>(at::get_num_threads(),
                                         size / std::max<int64_t>(grain * kGrainsPerThread, 1));
  const int64_t parts = std::max<int64_t>(most, 1);
  std::vector<std::exception_ptr> errors(parts);
  auto part = [&](int64_t p) {
    try {
      body(size * p / parts, size * (p + 1) / parts);
    } catch (...) {
      errors[p] = std::current_exception();
    }
  };
  std::vector<std::jthread> workers;
  for (int64_t p = 1; p < parts; ++p) workers.emplace_back(part, p);
  part(0);
  workers.clear();  // joins
  for (const auto& e : errors)
    if (e) std::rethrow_exception(e);
}

}  // namespace

const cpu::ParallelFor& threads() {
  static const cpu::ParallelFor run = [](int64_t size, int64_t grain, const cpu::Body& body) {
    if (forked_)
      on_new_threads(size, grain, body);
    else
      at::parallel_for(0, size, grain, body);
  };
  return run;
}

void run_operators(const std::function<void()>& run) {
  const auto call = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    run();
  };
  if (!forked_) return call();
  // A new thread has its own thread pool, and does not wait for threads of the parent.
  std::exception_ptr error;
  std::thread([&] {
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

at::Tensor copyable(const at::Tensor& t) { return t.element_size() == 1 ? t.view(at::kByte) : t; }

void copy_strided(const at::Tensor& dst, const at::Tensor& src) {
  const bool converts = dst.element_size() != src.element_size();
  run_operators([&] {
    if (converts)
      dst.copy_(src);
    else
      copyable(dst).copy_(copyable(src));
  });
}

namespace {

// A core copies this in about 10 us, several times the time it takes to wake a thread.
constexpr int64_t kGrainBytes = 128 * 1024;

void copy_row(std::byte* dst, const std::byte* src, int64_t bytes) {
  threads()(bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(dst + begin, src + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace

// Divides long rows among the threads by bytes, and many short rows by rows.
void copy_on_host(const cuda::CopyRect& r) {
  const auto bytes = static_cast<int64_t>(r.bytes), rows = static_cast<int64_t>(r.rows);
  if (rows == 1 || bytes >= kGrainBytes) {
    for (int64_t row = 0; row < rows; ++row)
      copy_row(r.dst + row * r.dst_pitch, r.src + row * r.src_pitch, bytes);
    return;
  }
  const int64_t grain = std::max<int64_t>(kGrainBytes / std::max<int64_t>(bytes, 1), 1);
  threads()(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(r.dst + row * r.dst_pitch, r.src + row * r.src_pitch, r.bytes);
  });
}

}  // namespace pycollect
