#include "system.h"

#include <sys/mman.h>
#include <sys/random.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

namespace pycollect::ipc {
namespace {

// Returns a byte that is 1 in this process and becomes 0 in its forked children, or null. It is
// never freed, and all objects that this copy of the library constructs in the process share it.
const unsigned char* byte_wiped_on_fork() {
  constexpr std::size_t kPageBytes = 4096;  // the smallest page; larger ones are mapped whole
  static std::atomic<unsigned char*> shared{nullptr};
  unsigned char* current = shared.load(std::memory_order_acquire);
  if (current != nullptr && *current != 0) return current;
  void* page =
      mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  const auto fresh = static_cast<unsigned char*>(page);
  // A kernel that accepts any advice, even -1, as emulators may, ignores it.
  if (madvise(page, kPageBytes, -1) != 0 && madvise(page, kPageBytes, MADV_WIPEONFORK) == 0) {
    *fresh = 1;
    if (shared.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return fresh;
  } else {
    current = nullptr;
  }
  munmap(page, kPageBytes);
  return current;  // the byte of the thread that was first
}

}  // namespace

void refuse(const std::string& what, int error) {
  throw std::system_error(error, std::generic_category(), what);
}

uint64_t random_number() {
  uint64_t number = 0;
  while (number == 0)
    if (getrandom(&number, sizeof number, 0) != sizeof number && errno != EINTR)
      refuse("getrandom", errno);
  return number;
}

ForkGuard::ForkGuard() : alive_(byte_wiped_on_fork()), pid_(getpid()) {}

void ForkGuard::require_not_forked(const char* operation) const {
  if (!forked()) [[likely]]
    return;
  throw CollectiveError(text(operation, ": this process was forked from the one that the group ",
                             "belongs to; create a group in this process"));
}

}  // namespace pycollect::ipc
