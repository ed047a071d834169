#include "fork_guard.h"

#include <sys/mman.h>

#include <atomic>
#include <cstddef>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// Returns a byte that is 1 in this process and becomes 0 in its forked children, or null. All
// objects of a process share it, and it is never freed. A forked child allocates another one.
const unsigned char* byte_wiped_on_fork() {
  constexpr std::size_t kPageBytes = 4096;  // the least that can be mapped
  static std::atomic<unsigned char*> shared{nullptr};
  unsigned char* current = shared.load(std::memory_order_acquire);
  if (current != nullptr && *current != 0) return current;
  void* page =
      mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  const auto fresh = static_cast<unsigned char*>(page);
  if (madvise(page, kPageBytes, MADV_WIPEONFORK) == 0) {
    *fresh = 1;
    if (shared.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return fresh;
  } else {
    current = nullptr;
  }
  munmap(page, kPageBytes);
  return current;  // the byte of the thread that was first
}

}  // namespace

ForkGuard::ForkGuard() : alive_(byte_wiped_on_fork()), pid_(getpid()) {}

void ForkGuard::require_not_forked(const char* operation) const {
  if (!forked()) [[likely]]
    return;
  throw CollectiveError(text(operation, ": this process was forked from the one that the group ",
                             "belongs to; create a group in this process"));
}

}  // namespace pycollect::ipc
