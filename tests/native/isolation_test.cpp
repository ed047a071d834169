// Ranks that the kernel separates: processes of several users, or in namespaces of their own.
// Either the group works, or each rank throws an error that names the obstacle.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "ranks.h"

namespace pycollect::ipc {
namespace {

constexpr uid_t kNobody = 65534, kSomebody = 65533;

bool switch_user(uid_t user) { return setresuid(user, user, user) == 0; }

// Enters a user namespace in which this process's user is `number` and no other user is mapped.
bool rename_user(uid_t user, uid_t number) {
  if (unshare(CLONE_NEWUSER) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) return false;
  std::ofstream("/proc/self/uid_map") << number << " " << user << " 1";
  return getuid() == number;
}

// Enters a mount namespace whose /dev/shm is too small for anything, as in containers.
bool leave_shm() {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4k") == 0;
}

bool limit_threads() {
  const rlimit least = {1, 1};
  return setrlimit(RLIMIT_NPROC, &least) == 0;
}

// Ranks, each after it has changed its user or namespaces: they work, or all end with this error.
// Root may fetch another user's descriptor, and another user may not fetch root's. Processes that
// switched to a user, unlike those that the user started, may not read each other's memory.
struct Isolation {
  const char* what;
  std::function<bool(Rank)> prepare;
  const char* error = "right";  // if they work
  int world = 2;
};
const std::vector<Isolation> kIsolations = {
    {"ranks of two users", [](Rank r) { return switch_user(r == 0 ? kNobody : kSomebody); },
     "; rank 0 is run by user 65534, rank 1 by user 65533, and all ranks need the same user"},
    {"root fetches", [](Rank r) { return r == 1 || switch_user(kNobody); }},
    {"a user fetches from root", [](Rank r) { return r == 0 || switch_user(kNobody); },
     "; rank 0 is run by user 0, rank 1 by user 65534, and"},
    {"another user", [](Rank) { return switch_user(kNobody); }},
    {"root in a user namespace", [](Rank r) { return r == 0 || rename_user(0, 7); }},
    {"another user in a user namespace",
     [](Rank r) { return r == 0 || (switch_user(kNobody) && rename_user(kNobody, 7)); },
     "; rank 0 is in another user namespace than rank 1, and both must be the same user of the "
     "host"},
    {"another user as root of a user namespace",
     [](Rank r) { return r == 0 || (switch_user(kNobody) && rename_user(kNobody, 0)); },
     "; rank 0 is in another user namespace than rank 1, and both must be"},
    {"no /dev/shm", [](Rank) { return leave_shm(); }},
    {"no more threads", [](Rank r) { return switch_user(kNobody) && (r == 0 || limit_threads()); },
     "CollectiveError: the ranks of group 'default' cannot share memory; rank 1: this process "
     "cannot make another thread"},
    {"two networks", [](Rank r) { return r <= 1 || unshare(CLONE_NEWNET) == 0; },
     "; ranks 0, 1 are in another network namespace than ranks 2, 3, and", 4},
};

void works_or_names_the_obstacle() {
  for (const Isolation& it : kIsolations) {
    std::puts(it.what);
    const auto ends = run(it.world, quick_settings(), [&](RankContext& me) {
      return it.prepare(me.rank) ? join(me) : text("cannot prepare: ", std::strerror(errno));
    });
    expect_each_part(ends, it.error);
  }
}

// Both ranks are the first process of a pid namespace, and so have the same pid.
void detects_deaths_across_pid_namespaces() {
  for (const bool execs : {true, false}) {
    const auto ends = run(2, quick_settings(), [&](RankContext& me) {
      if (unshare(CLONE_NEWPID) != 0) return std::string("cannot make a pid namespace");
      expect_in_child([&] {
        Group group(me.store, me.rank, me.world, me.settings);
        const auto begin = Clock::now();
        if (me.rank == 1) {
          std::this_thread::sleep_for(300ms);
          if (execs) execl("/bin/sleep", "sleep", "2", nullptr);
          _exit(0);
        }
        const std::string message = refusal([&] { group.await(1, at_run(1), me.context(20s)); });
        const auto waited = Clock::now() - begin;
        expect(waited > 250ms && waited < 1500ms, "detected too early or too late");
        me.store.post("message", message);
      });
      return me.rank == 1 ? std::string() : me.store.read("message", Clock::now() + 1s);
    });
    expect_part(ends[0].result, "rank 1 (pid 1) died");
  }
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  if (geteuid() != 0)
    return std::puts("isolation_test: SKIPPED: no right to become another user"), 0;
  pycollect::run_tests(
      {{"works or names the obstacle", works_or_names_the_obstacle},
       {"detects deaths across pid namespaces", detects_deaths_across_pid_namespaces}});
}
