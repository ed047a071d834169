#include "wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <climits>

namespace pycollect::ipc {
namespace {

static_assert(std::endian::native == std::endian::little, "the lower half comes first");
static_assert(std::atomic<uint64_t>::is_always_lock_free);

const void* lower_half(const std::atomic<uint64_t>& word) { return &word; }

}  // namespace

void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen, std::chrono::nanoseconds at_most) {
  if (at_most <= at_most.zero()) return;
  constexpr std::chrono::seconds kSecond{1};
  const timespec time = {.tv_sec = at_most / kSecond, .tv_nsec = (at_most % kSecond).count()};
  syscall(SYS_futex, lower_half(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &time, nullptr, 0);
}

void wake_sleepers(const std::atomic<uint64_t>& word) {
  syscall(SYS_futex, lower_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace pycollect::ipc
