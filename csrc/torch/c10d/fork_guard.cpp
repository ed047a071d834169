// See fork_guard.h. Counts forks, because getpid() costs more than the rest of a call.
#include "fork_guard.h"

#include <pthread.h>

#include "../../plan/error.h"

namespace pycollect::dist {
namespace {

uint64_t generation_ = 0;  // changed only in a child, before its first instruction
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation_; });

}  // namespace

ForkGuard::ForkGuard() : before_(generation_) {}
bool ForkGuard::forked() const { return before_ != generation_; }

void ForkGuard::require_not_forked(const char* operation) const {
  if (!forked()) [[likely]]
    return;
  throw CollectiveError(text(operation, ": this process was forked from the one that the group ",
                             "belongs to; create a group in this process"));
}

}  // namespace pycollect::dist
