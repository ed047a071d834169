// See forks.h. Counted, because asking the kernel for the process's number costs more than the rest
// of a call.
#include "forks.h"

#include <pthread.h>

#include "../../plan/error.h"

namespace pycollect::dist {
namespace {

uint64_t generation_ = 0;  // only ever changed in a child, between fork and its first instruction
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation_; });

}  // namespace

Forks::Forks() : before_(generation_) {}
bool Forks::none() const { return before_ == generation_; }

void Forks::require_none(const char* operation) const {
  if (none()) [[likely]]
    return;
  throw CollectiveError(text(operation, ": this process was forked from the one that the group ",
                             "belongs to; make a group of its own"));
}

}  // namespace pycollect::dist
