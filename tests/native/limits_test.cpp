// Limits of a group: excessive sizes and timeouts, and threads and locks that cannot be created.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>

#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

void refuses_excessive_sizes() {
  for (std::size_t GroupSettings::* size :
       {&GroupSettings::buffer_bytes, &GroupSettings::mailbox_bytes,
        &GroupSettings::symmetric_heap_bytes})
    for (const std::size_t bytes : {kMostBytes + 1, std::size_t{1} << 63, ~std::size_t{0}}) {
      GroupSettings settings = quick_settings();
      settings.*size = bytes;
      MapStore store;
      const std::string message = refusal([&] { Group(store, 0, 1, settings); });
      expect(contains(message, text("_bytes is ", bytes, "; it must be at most ")), message);
    }
  GroupSettings settings = quick_settings();
  settings.symmetric_heap_bytes = kMostBytes;
  MapStore store;
  const std::string message = refusal([&] { Group(store, 0, 1, settings); });
  expect(message == "nothing" || contains(message, "address space"), message);
}

// Timeouts that are longer than the clock can represent never expire.
void accepts_huge_timeouts() {
  for (const auto timeout : {std::chrono::milliseconds::max(), 300ms * 1000 * 3600 * 24 * 366}) {
    GroupSettings settings = quick_settings();
    settings.timeout = timeout;
    const auto ends = run(2, settings, [](RankContext& me) {
      if (me.rank == 1) std::this_thread::sleep_for(100ms);
      Group group(me.store, me.rank, me.world, me.settings);
      if (me.rank == 1) std::this_thread::sleep_for(100ms);
      group.advance(at_run(1));
      group.await(1 - me.rank, at_run(1), {"barrier", 1, deadline_after(me.settings.timeout)});
      return std::string("right");
    });
    for (const RankExit& end : ends) expect_equal(end.result, "right");
  }
  const auto before = -300ms * 1000 * 3600 * 24 * 366;  // 300 years exceed the clock
  expect(deadline_after(before) < Clock::now() + 10s, "no time at all");
}

// The default stack is too large for any thread to be created: signals must not stay blocked.
void restores_the_signal_mask() {
  const pid_t pid = fork();
  if (pid == 0) {
    pthread_attr_t vast;
    pthread_attr_init(&vast);
    pthread_attr_setstacksize(&vast, std::size_t{1} << 50);
    if (pthread_setattr_default_np(&vast) != 0) _exit(3);
    Control control;
    const std::string message = refusal([&] { FailureDetector(control, 1, 0); });
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    _exit(message == "nothing" ? 2 : sigismember(&now, SIGINT));
  }
  int status = 0;
  waitpid(pid, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) != 2, "the thread was made");
  expect(WEXITSTATUS(status) == 0, text("signals are blocked: ", WEXITSTATUS(status)));
}

// A kernel without robust lists, as in emulators: every rank throws, as deaths would stay
// undetected.
void reports_missing_robust_lists() {
  const auto ends = run(2, quick_settings(), [](RankContext& me) {
    const std::array<sock_filter, 4> refused = {
        sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_set_robust_list, 0, 1),
        sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program = {refused.size(), const_cast<sock_filter*>(refused.data())};
    if (me.rank == 1 && (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
                         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0))
      return std::string("no filter");
    Group group(me.store, me.rank, me.world, me.settings);
    return std::string("nothing");
  });
  for (const RankExit& end : ends)
    expect_equal(
        end.result,
        "CollectiveError: the ranks of group 'default' cannot share memory; rank 1: cannot "
        "register the lock by which peers detect this process's death (set_robust_list): "
        "Function not implemented");
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  refuses_excessive_sizes();
  accepts_huge_timeouts();
  restores_the_signal_mask();
  reports_missing_robust_lists();
  std::puts("limits_test: all good");
}
