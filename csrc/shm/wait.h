// How to wait for another process: pauses where it can be running, then the core is offered to it,
// and the kernel is asked to wake only when that has gone on for long.
#pragma once
#include <cstdint>
#include <string>

#include "board.h"

namespace pycollect::shm {

// What somebody waits in, for the message when it fails.
struct Occasion {
  const char* operation;  // "all_reduce"
  uint64_t call;          // its sequence number
  Deadline deadline;
};

}  // namespace pycollect::shm
