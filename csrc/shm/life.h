// Who of the other ranks is dead, or has become another program. By descriptors of each process and
// of its memory, where process numbers mean the same to all ranks; otherwise by a lock that each
// holds and the kernel lets go of at its end: unlike a pulse it is no work for anybody, does not
// mistake a stopped process for a dead one, and a forked child does not keep it up.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "layout.h"

namespace pycollect::shm {

class Peers {
 public:
  virtual ~Peers() = default;
  virtual uint64_t dead() = 0;  // a bit for each; from any thread
};

bool can_open_pidfd();
// The ranks must be known to live until after this: a number can be given to a new process.
std::unique_ptr<Peers> watch_by_pidfd(const std::vector<pid_t>& pids, Rank me);
// Begins to hold this rank's lock. The others' are looked at only when all have come so far.
std::unique_ptr<Peers> watch_by_lock(Control& control, int world, Rank me);

}  // namespace pycollect::shm
