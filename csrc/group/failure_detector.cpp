#include "failure_detector.h"

#include <sys/syscall.h>

#include <cerrno>

#include "new_thread.h"

namespace pycollect::ipc {
namespace {

// Replaces the robust list that the C library has registered for this thread. The thread must not
// hold a robust mutex of the C library.
int register_locks(robust_list_head* list) {
  return syscall(SYS_set_robust_list, list, sizeof *list) == 0 ? 0 : errno;
}

}  // namespace

FailureDetector::FailureDetector(Control& control, int world, Rank me)
    : control_(control), world_(world) {
  LivenessLock& mine = control.liveness[me];
  lock_holder_ =
      std::make_unique<std::thread>(new_thread_without_signals([this, &mine] { hold(mine); }));
  lock_held_.acquire();
  if (failed_ != 0) {
    lock_holder_->join();
    refuse("cannot register the lock by which peers detect this process's death (set_robust_list)",
           failed_);
  }
  mine.pid.store(getpid(), std::memory_order_release);
}

FailureDetector::~FailureDetector() {
  if (fork_guard_.forked()) {
    static_cast<void>(lock_holder_.release());  // the thread exists only in the parent process
    return;
  }
  end_.release();
  lock_holder_->join();
}

void FailureDetector::hold(LivenessLock& mine) {
  pthread_setname_np(pthread_self(), "pycollect life");
  mine.entry.next = &mine.list.list;  // circular list of one entry
  mine.list.list.next = &mine.entry;
  mine.list.futex_offset =
      reinterpret_cast<const char*>(&mine.holder) - reinterpret_cast<const char*>(&mine.entry);
  mine.list.list_op_pending = nullptr;
  mine.holder.store(static_cast<uint32_t>(syscall(SYS_gettid)));
  failed_ = register_locks(&mine.list);
  lock_held_.release();
  if (failed_ != 0) return;
  end_.acquire();
  register_locks(nullptr);
}

uint64_t FailureDetector::dead() const {
  uint64_t dead = 0;
  for (Rank r = 0; r < world_; ++r)
    if ((control_.liveness[r].holder.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0)
      dead |= uint64_t{1} << r;
  return dead;
}

}  // namespace pycollect::ipc
