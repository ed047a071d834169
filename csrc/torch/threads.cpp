#include "threads.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace pycollect {
namespace {

std::atomic<bool> forked_{
    false};  // only ever set in a child, between fork and its first instruction
[[maybe_unused]] const int forks_are_noticed =
    pthread_atfork(nullptr, nullptr, [] { forked_ = true; });

// A thread lives for one call here, which costs some 50 us, so that each must be worth more.
constexpr int64_t kFewestParts = 64;

void on_new_threads(int64_t size, int64_t grain, const cpu::Body& body) {
  const int64_t most =
      std::min<int64_t>(at::get_num_threads(), size / std::max<int64_t>(grain * kFewestParts, 1));
  const int64_t parts = std::max<int64_t>(most, 1);
  std::vector<std::exception_ptr> errors(parts);
  auto part = [&](int64_t p) {
    try {
      body(size * p / parts, size * (p + 1) / parts);
    } catch (...) {
      errors[p] = std::current_exception();
    }
  };
  std::vector<std::jthread> team;
  for (int64_t p = 1; p < parts; ++p) team.emplace_back(part, p);
  part(0);
  team.clear();
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

void copy_strided(const at::Tensor& dst, const at::Tensor& src) {
  const auto copy = [&] {
    const at::AutoDispatchBelowADInplaceOrView
        as_memory;  // also of inference tensors, on any thread
    dst.copy_(src);
  };
  if (!forked_) return copy();
  // A new thread begins with a pool of its own, so nothing is waited for that the parent kept.
  std::exception_ptr error;
  std::thread([&] {
    try {
      copy();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

}  // namespace pycollect
