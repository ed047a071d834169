// What a process may lack: threads, memory of its control group, the kernel's lists of robust
// locks. And the fork guard.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <optional>

#include "ranks.h"

namespace pycollect::ipc {
namespace {

// Makes a system call fail in this process.
void forbid(uint32_t call, uint32_t error) {
  const std::array<sock_filter, 4> filter = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program = {filter.size(), const_cast<sock_filter*>(filter.data())};
  expect(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
             prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
         "cannot forbid a system call");
}

// The default stack is too large for any thread to be created: signals must not stay blocked.
void restores_the_signal_mask() {
  expect_in_child([] {
    pthread_attr_t vast;
    pthread_attr_init(&vast);
    pthread_attr_setstacksize(&vast, std::size_t{1} << 50);
    expect(pthread_setattr_default_np(&vast) == 0, "cannot set the stack size");
    Control control;
    expect_part(refusal([&] { FailureDetector(control, 1, 0); }), "cannot make another thread");
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    expect(sigismember(&now, SIGINT) == 0, "signals are blocked");
  });
}

// A kernel without robust lists, as in emulators: every rank throws, as deaths would stay
// undetected.
void reports_missing_robust_lists() {
  const auto ends = run(2, quick_settings(), [](RankContext& me) {
    if (me.rank == 1) forbid(SYS_set_robust_list, ENOSYS);
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
  expect_in_child([&] {
    expect(outer.forked() && forked_in_threads() == 0, "a child has found the wrong state");
    const ForkGuard inner;
    expect(!inner.forked(), "the child's own guard reports a fork");
    expect_in_child([&] {
      expect(outer.forked() && inner.forked() && !ForkGuard().forked(), "wrong in a grandchild");
    });
  });
  expect(!outer.forked() && forked_in_threads() == 0, "a fork is reported after children ended");
  // A child that no handler of pthread_atfork sees.
  const auto raw = static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
  if (raw == 0) _exit(outer.forked() ? 0 : 1);
  int status = 1;
  expect(waitpid(raw, &status, 0) == raw && status == 0, "a raw fork is not seen");
}

void detects_forks_without_wiped_pages() {
  expect_in_child([] {
    forbid(SYS_madvise, EINVAL);
    detects_forks();
  });
}

constexpr std::size_t kMiB = 1 << 20;

// Available memory under the limits of control groups. Writes one file after the other, and then
// reads the available memory, if it is given: its bytes and the control group that limits it.
struct CgroupChange {
  const char *file, *content;
  std::size_t swap = 0;
  std::optional<std::size_t> bytes = {};
  const char* where = "/job";
};
void check_changes(std::initializer_list<CgroupChange> changes) {
  const TemporaryFolder folder;
  const fs::path root = folder.path();
  for (const CgroupChange& change : changes) {
    write(root / change.file, change.content);
    if (!change.bytes) continue;
    const AvailableMemory got = available_in_cgroups(root / "list", root, change.swap);
    const std::string where = *change.bytes == SIZE_MAX ? "" : "in the control group ";
    expect_equal(
        text(change.file, " ", got.bytes, " ", got.where),
        text(change.file, " ", *change.bytes, " ", where, where.empty() ? "" : change.where));
  }
}

// The group with the least available memory counts, of a group and its ancestors. Pages of files
// count as free, and swap as far as the group may use it.
void reads_cgroup_v2() {
  check_changes({{"list", "0::/job/step", 7, SIZE_MAX},
                 {"job/step/memory.max", "max", 7, SIZE_MAX},
                 {"job/memory.max", "1000"},
                 {"job/memory.current", "900", 0, 100},
                 {"job/memory.current", "900", 7, 107},
                 {"job/memory.stat", "anon 500\ninactive_file 30\nactive_file 20\nshmem 5", 7, 157},
                 {"job/memory.swap.max", "5"},
                 {"job/memory.swap.current", "4", 7, 151},
                 {"job/memory.swap.max", "max", 7, 157},
                 {"job/step/memory.max", "60"},
                 {"job/step/memory.current", "90", 0, 0, "/job/step"}});
}

// In a container, the root group may be listed with its name on the host.
void reads_cgroup_v1() {
  check_changes(
      {{"memory/memory.limit_in_bytes", "9223372036854771712"},
       {"memory/job/memory.limit_in_bytes", "1000"},
       {"memory/job/memory.usage_in_bytes", "900"},
       {"memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20"},
       {"list", "4:cpu:/other\n3:hugetlb,memory:/job\n0::/", 7, 157},
       {"memory/job/memory.memsw.limit_in_bytes", "1001"},
       {"memory/job/memory.memsw.usage_in_bytes", "900", 7, 151},
       {"list", "3:memory:/docker/4711"},
       {"memory/memory.limit_in_bytes", "200"},
       {"memory/memory.usage_in_bytes", "50", 0, 150, "/"}});
}

// Moves this process to a new control group of `bytes`; returns false where that is not permitted.
bool join_group(const fs::path& folder, const char* limit_file, std::size_t bytes) {
  std::error_code error;
  if (!fs::create_directory(folder, error)) return false;
  std::ofstream limit(folder / limit_file), members(folder / "cgroup.procs");
  limit << bytes << std::flush;
  members << getpid() << std::flush;
  return limit.good() && members.good();
}

void throws_before_the_oom_killer() {
  const bool first = fs::exists("/sys/fs/cgroup/memory");
  const std::string name = text("pycollect-", getpid());
  const fs::path folder = fs::path(first ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup") / name;
  expect_in_child([&] {
    if (!join_group(folder, first ? "memory.limit_in_bytes" : "memory.max", 64 * kMiB))
      return void(std::puts("  SKIPPED: no right to make a control group"));
    const auto segment = Segment::create(1024 * kMiB);
    segment->commit(0, 16 * kMiB);
    const std::string message = refusal([&] { segment->commit(0, 256 * kMiB); });
    expect_part(message, "no memory for 256 MiB of shared memory");
    expect_part(message, text("in the control group /", name));
  });
  rmdir(folder.c_str());
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  pycollect::run_tests({{"restores the signal mask", restores_the_signal_mask},
                        {"reports missing robust lists", reports_missing_robust_lists},
                        {"detects forks", detects_forks},
                        {"detects forks without wiped pages", detects_forks_without_wiped_pages},
                        {"reads cgroup v2", reads_cgroup_v2},
                        {"reads cgroup v1", reads_cgroup_v1},
                        {"throws before the OOM killer", throws_before_the_oom_killer}});
}
