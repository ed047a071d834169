// What a process may lack: threads, the kernel's lists of robust locks, pages that
// are wiped in a forked child. And the fork guard, with and without such pages.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <optional>

#include "../../csrc/group/fork_guard.h"
#include "ranks.h"

namespace pycollect::ipc {
namespace {

// Makes a system call with this third argument, or any, fail in this process and its children.
bool forbid(uint32_t call, uint32_t error, std::optional<uint32_t> third = {}) {
  const std::array<sock_filter, 6> filter = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      sock_filter BPF_JUMP(BPF_JMP | (third ? BPF_JEQ : BPF_JGE) | BPF_K, third.value_or(0), 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program = {filter.size(), const_cast<sock_filter*>(filter.data())};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// The default stack is too large for any thread to be created: signals must not stay blocked.
void restores_the_signal_mask() {
  const int status = status_of_child([] {
    pthread_attr_t vast;
    pthread_attr_init(&vast);
    pthread_attr_setstacksize(&vast, std::size_t{1} << 50);
    if (pthread_setattr_default_np(&vast) != 0) return 3;
    Control control;
    if (refusal([&] { FailureDetector(control, 1, 0); }) == "nothing") return 2;
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    return sigismember(&now, SIGINT);
  });
  expect(status == 0, text("signals are blocked: ", WEXITSTATUS(status)));
}

// A kernel without robust lists, as in emulators: every rank throws, as deaths would stay
// undetected.
void reports_missing_robust_lists() {
  const auto ends = run(2, quick_settings(), [](RankContext& me) {
    if (me.rank == 1 && !forbid(SYS_set_robust_list, ENOSYS)) return std::string("no filter");
    return join(me);
  });
  expect_each(ends,
              "CollectiveError: the ranks of group 'default' cannot share memory; rank 1: cannot "
              "register the lock by which peers detect this process's death (set_robust_list): "
              "Function not implemented");
}

// Constructs guards in several threads at once; returns how many report a fork.
int forked_in_threads() {
  std::atomic<int> forked{0};
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) forked += ForkGuard().forked();
    });
  threads.clear();
  return forked;
}

void detects_forks() {
  const ForkGuard outer;
  expect(!outer.forked(), "a fork is reported in the process of the guard");
  const int status = status_of_child([&] {
    const int in_threads = forked_in_threads();
    const ForkGuard inner;
    if (!outer.forked() || inner.forked() || in_threads != 0) return 1;
    return status_of_child(
        [&] { return outer.forked() && inner.forked() && !ForkGuard().forked() ? 0 : 1; });
  });
  expect(status == 0, "a child or grandchild has found the wrong state");
  expect(!outer.forked() && forked_in_threads() == 0, "a fork is reported after children ended");
}

void detects_forks_without_wiped_pages() {
  const int status = status_of_child([] {
    if (!forbid(SYS_madvise, EINVAL, MADV_WIPEONFORK)) return 2;
    detects_forks();  // exits with a failure by itself
    return 0;
  });
  expect(status == 0, "the state is wrong without MADV_WIPEONFORK");
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  pycollect::run_tests({{"restores the signal mask", restores_the_signal_mask},
                        {"reports missing robust lists", reports_missing_robust_lists},
                        {"detects forks", detects_forks},
                        {"detects forks without wiped pages", detects_forks_without_wiped_pages}});
  std::puts("limits_test: all good");
}
