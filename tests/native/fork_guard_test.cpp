// The fork guard: children, their children and threads, with and without a kernel that can clear a
// page on fork.
#include "../../csrc/group/fork_guard.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

// Returns the exit status of a child that runs `body`; the child's own failures exit with 1.
int child(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Constructs guards in several threads at once; returns how many report a fork.
int forked_in_threads() {
  std::atomic<int> forked{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) forked += ForkGuard().forked();
    });
  for (std::thread& thread : threads) thread.join();
  return forked;
}

void detects_forks() {
  const ForkGuard outer;
  expect(!outer.forked(), "a fork is reported in the process of the guard");
  const int status = child([&] {
    const int in_threads = forked_in_threads();
    const ForkGuard inner;
    if (!outer.forked() || inner.forked() || in_threads != 0) return 1;
    return child([&] { return outer.forked() && inner.forked() && !ForkGuard().forked() ? 0 : 1; });
  });
  expect(status == 0, "a child or grandchild has found the wrong state");
  expect(!outer.forked() && forked_in_threads() == 0, "a fork is reported after children ended");
}

// Makes madvise(..., MADV_WIPEONFORK) fail in this process, as in kernels that lack it.
bool forbid_wiping() {
  const std::array<sock_filter, 6> filter = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_WIPEONFORK, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program = {filter.size(), const_cast<sock_filter*>(filter.data())};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  detects_forks();
  const int status = child([] {
    if (!forbid_wiping()) return 2;
    detects_forks();  // exits with a failure by itself
    return 0;
  });
  expect(status == 0, "the state is wrong without MADV_WIPEONFORK");
  std::puts("fork_guard_test: all good");
}
