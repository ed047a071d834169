// A thread of a group's own, or the sentence that there can be none: at a limit of processes, or
// without memory for its stack.
#pragma once
#include <system_error>
#include <thread>

#include "../plan/error.h"

namespace pycollect::shm {

template <class Body>
std::thread new_thread(Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw CollectiveError(text("this process cannot make another thread (", error.code().message(),
                               "); allow it more threads (ulimit -u, the cgroup's pids.max) or ",
                               "more memory"));
  }
}

}  // namespace pycollect::shm
