#include "life.h"

#include <sys/syscall.h>

#include <cerrno>

#include "new_thread.h"

namespace pycollect::shm {
namespace {

// Instead of what the C library has registered for this thread, which then may hold no robust lock
// of that one's.
int register_locks(robust_list_head* list) {
  return syscall(SYS_set_robust_list, list, sizeof *list) == 0 ? 0 : errno;
}

}  // namespace

Peers::Peers(Control& control, int world, Rank me) : control_(control), world_(world) {
  Life& mine = control.lives[me];
  holder_ =
      std::make_unique<std::thread>(new_thread_without_signals([this, &mine] { hold(mine); }));
  held_.acquire();
  if (failed_ != 0) {
    holder_->join();
    refuse("the kernel would tell nobody of this process's death (set_robust_list)", failed_);
  }
  mine.pid.store(getpid(), std::memory_order_release);
}

Peers::~Peers() {
  if (!origin_.is_here()) {
    static_cast<void>(holder_.release());  // it stayed with the parent: nothing here is that thread
    return;
  }
  end_.release();
  holder_->join();
}

void Peers::hold(Life& mine) {
  pthread_setname_np(pthread_self(), "pycollect life");
  mine.entry.next = &mine.list.list;  // a ring
  mine.list.list.next = &mine.entry;
  mine.list.futex_offset =
      reinterpret_cast<const char*>(&mine.holder) - reinterpret_cast<const char*>(&mine.entry);
  mine.list.list_op_pending = nullptr;
  mine.holder.store(static_cast<uint32_t>(syscall(SYS_gettid)));
  failed_ = register_locks(&mine.list);
  held_.release();
  if (failed_ != 0) return;
  end_.acquire();
  register_locks(nullptr);
}

uint64_t Peers::dead() const {
  uint64_t dead = 0;
  for (Rank r = 0; r < world_; ++r)
    if ((control_.lives[r].holder.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0)
      dead |= uint64_t{1} << r;
  return dead;
}

}  // namespace pycollect::shm
