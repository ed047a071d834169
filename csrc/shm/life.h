// Who of the other ranks is dead, or has become another program: by a lock that each holds and the
// kernel lets go of at its end (a robust futex), wherever the others are. Unlike a pulse it is no
// work for anybody, does not mistake a stopped process for a dead one, and a forked child does not
// keep it up. Unlike a descriptor of the process it tells before a GPU's driver has cleared up
// after it.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <semaphore>
#include <thread>

#include "layout.h"
#include "system.h"

namespace pycollect::shm {

class Peers {
 public:
  // Returns when this rank's lock is held, by a thread that does nothing else: the kernel keeps
  // account of threads, and any other may end before the process.
  Peers(Control& control, int world, Rank me);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // A bit for each rank, from any thread. Neither who has not come yet is dead nor who has left.
  uint64_t dead() const;
  pid_t pid(Rank r) const { return control_.lives[r].pid.load(std::memory_order_acquire); }

 private:
  void hold(Life& mine);

  Control& control_;
  const int world_;
  const Origin origin_;
  int failed_ = 0;
  std::binary_semaphore held_{0}, end_{0};
  std::unique_ptr<std::thread> holder_;
};

}  // namespace pycollect::shm
