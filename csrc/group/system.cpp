#include "system.h"

#include <pthread.h>
#include <sys/random.h>

#include <cerrno>

namespace pycollect::ipc {
namespace {

// Returns how often this process, and its ancestors since they loaded the library, were forked.
const std::atomic<uint64_t>& forks() {
  static std::atomic<uint64_t> count{0};
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { ++count; });
  return count;
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

ForkGuard::ForkGuard() : forks_(&forks()), before_(*forks_) {}

void ForkGuard::require_not_forked(const char* operation) const {
  if (!forked()) [[likely]]
    return;
  throw CollectiveError(text(operation, ": this process was forked from the one that the group ",
                             "belongs to; create a group in this process"));
}

}  // namespace pycollect::ipc
