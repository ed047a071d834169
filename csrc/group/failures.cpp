#include "failures.h"

#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// How long a rank that finds the group aborted waits for the cause text, which is written at once
// unless its writer is killed.
constexpr std::chrono::milliseconds kCauseTimeout{100};

template <std::size_t n>
void write(std::array<char, n>& to, const std::string& from) {
  std::memcpy(to.data(), from.data(), std::min(from.size(), n - 1));  // keeps the final zero
}

// Replaces the robust list that the C library has registered for this thread. The thread must not
// hold a robust mutex of the C library.
int register_locks(robust_list_head* list) {
  return syscall(SYS_set_robust_list, list, sizeof *list) == 0 ? 0 : errno;
}

}  // namespace

std::string AbortState::name(const OpContext& context) const {
  return text(context.operation, " #", context.shown, " of group '", group_, "'");
}

void AbortState::set(const AbortCause& cause, const OpContext* found_in) {
  uint64_t first = record_.first_call.load();
  while ((first == 0 || cause.first_call + 1 < first) &&
         !record_.first_call.compare_exchange_weak(first, cause.first_call + 1)) {
  }
  uint32_t healthy = AbortRecord::healthy;
  if (!record_.state.compare_exchange_strong(healthy, AbortRecord::being_written)) return;
  if (found_in != nullptr) {
    record_.call = found_in->shown;
    write(record_.operation, found_in->operation);
  }
  write(record_.cause, cause.text);
  record_.state.store(cause.kind, std::memory_order_release);
}

void AbortState::rethrow(const OpContext& context) const {
  const AbortCause why = cause();
  const std::string found_in = read_text(record_.operation);
  const bool here = found_in == context.operation && record_.call == context.shown;
  const std::string since =
      here || found_in.empty() ? "" : text("broken since ", found_in, " #", record_.call, ": ");
  throw_failure(why.kind, text(name(context), ": ", since, why.text));
}

void AbortState::rethrow() const {
  const AbortCause why = cause();
  throw_failure(why.kind, text("group '", group_, "': ", why.text));
}

AbortCause AbortState::cause() const {
  const Deadline end = Clock::now() + kCauseTimeout;
  uint32_t state = AbortRecord::being_written;
  while ((state = record_.state.load(std::memory_order_acquire)) == AbortRecord::being_written) {
    if (Clock::now() >= end)
      return {AbortRecord::lost, "a rank died while it published why it aborted the group"};
    sched_yield();
  }
  return {state, read_text(record_.cause), record_.first_call.load() - 1};
}

void throw_failure(uint32_t kind, const std::string& why) {
  if (kind == AbortRecord::timed_out) throw Timeout(why);
  throw PeerLost(why);
}

FailureDetector::FailureDetector(Control& control, int world, Rank me)
    : control_(control), world_(world) {
  LivenessLock& mine = control.liveness[me];
  std::promise<int> registers;
  auto registered = registers.get_future();
  auto hold = [this, &mine, registers = std::move(registers)]() mutable {
    pthread_setname_np(pthread_self(), "pycollect life");
    mine.entry.next = &mine.list.list;  // circular list of one entry
    mine.list.list.next = &mine.entry;
    mine.list.futex_offset =
        reinterpret_cast<const char*>(&mine.holder) - reinterpret_cast<const char*>(&mine.entry);
    mine.list.list_op_pending = nullptr;
    mine.holder.store(static_cast<uint32_t>(syscall(SYS_gettid)));
    const int error = register_locks(&mine.list);
    registers.set_value(error);
    if (error != 0) return;
    end_.acquire();
    register_locks(nullptr);
  };
  lock_holder_ = std::make_unique<std::thread>(new_thread_without_signals(std::move(hold)));
  if (const int error = registered.get(); error != 0) {
    lock_holder_->join();
    refuse("cannot register the lock by which peers detect this process's death (set_robust_list)",
           error);
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

uint64_t FailureDetector::dead() const {
  uint64_t dead = 0;
  for (Rank r = 0; r < world_; ++r)
    if ((control_.liveness[r].holder.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0)
      dead |= uint64_t{1} << r;
  return dead;
}

}  // namespace pycollect::ipc
