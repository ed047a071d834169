// Ranks that the kernel separates: processes of several users, or in namespaces of their own.
// Either the group works, or each rank throws an error that names the obstacle.
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "../../csrc/bootstrap/fd_server.h"
#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

constexpr uid_t kNobody = 65534, kSomebody = 65533;

// Runs two ranks, each after `prepare` has changed its user or namespaces; returns how they ended.
std::vector<RankExit> run_prepared(const GroupSettings& settings,
                                   const std::function<bool(Rank)>& prepare) {
  return run(2, settings, [&](RankContext& me) {
    if (!prepare(me.rank)) return text("cannot prepare the rank: ", std::strerror(errno));
    Group group(me.store, me.rank, me.world, me.settings);
    group.advance(at_run(1));
    group.await(1 - me.rank, at_run(1), me.context(10s));
    return std::string("right");
  });
}

bool switch_user(uid_t user) { return setresuid(user, user, user) == 0; }

// Enters a mount namespace whose /dev/shm is too small for anything, as in containers.
bool leave_shm() {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=4k") == 0;
}

void names_users() {
  const auto ends = run_prepared(quick_settings(),
                                 [](Rank r) { return switch_user(r == 0 ? kNobody : kSomebody); });
  for (const RankExit& end : ends) {
    expect(end.result.starts_with("CollectiveError: "), end.result);
    expect(
        end.result.ends_with("; rank 0 is run by user 65534, rank 1 by user 65533, and all ranks "
                             "need the same user"),
        end.result);
  }
}

// Root may fetch another user's descriptor. Another user may not fetch root's: both ranks report
// it.
void works_where_root_fetches() {
  for (const RankExit& end :
       run_prepared(quick_settings(), [](Rank r) { return r == 1 || switch_user(kNobody); }))
    expect_equal(end.result, "right");
  for (const RankExit& end :
       run_prepared(quick_settings(), [](Rank r) { return r == 0 || switch_user(kNobody); }))
    expect(contains(end.result, "; rank 0 is run by user 0, rank 1 by user 65534, and"),
           end.result);
}

// Processes that switched to a user, unlike those that the user started, may not read each other's
// memory.
void works_as_another_user() {
  for (const RankExit& end :
       run_prepared(quick_settings(), [](Rank) { return switch_user(kNobody); }))
    expect_equal(end.result, "right");
}

// Enters a user namespace in which this process's user is `number` and no other user is mapped.
bool rename_user(uid_t user, uid_t number) {
  if (unshare(CLONE_NEWUSER) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) return false;
  std::ofstream("/proc/self/uid_map") << number << " " << user << " 1";
  return getuid() == number;
}

void works_in_user_namespaces() {
  for (const RankExit& end :
       run_prepared(quick_settings(), [](Rank r) { return r == 0 || rename_user(0, 7); }))
    expect_equal(end.result, "right");
  for (const uid_t number : {7, 0}) {  // root of that namespace is refused, too
    const auto other = [=](Rank r) {
      return r == 0 || (switch_user(kNobody) && rename_user(kNobody, number));
    };
    for (const RankExit& end : run_prepared(quick_settings(), other)) {
      expect(contains(end.result,
                      "; rank 0 is in another user namespace than rank 1, and both must "
                      "be the same user of the host"),
             end.result);
      expect(end.elapsed < 2s, "took too long");
    }
  }
}

void names_networks() {
  GroupSettings settings = quick_settings();
  settings.timeout = 3s;
  const auto ends = run(4, settings, [](RankContext& me) {
    if (me.rank > 1 && unshare(CLONE_NEWNET) != 0) return std::string("cannot prepare the rank");
    Group group(me.store, me.rank, me.world, me.settings);
    return std::string("nothing");
  });
  for (const RankExit& end : ends) {
    expect(end.result.starts_with(
               "invalid_argument: all ranks of group 'default' must be on one host"),
           end.result);
    expect(contains(end.result, " (container 1), rank 2 is on "), end.result);
    expect(
        contains(end.result, "; ranks 0, 1 are in another network namespace than ranks 2, 3, and"),
        end.result);
    expect(end.elapsed < 2s, "took too long");
  }
}

void works_without_shm() {
  for (const RankExit& end : run_prepared(quick_settings(), [](Rank) { return leave_shm(); }))
    expect_equal(end.result, "right");
}

void names_rank_without_threads() {
  const auto prepare = [](Rank r) {
    const rlimit least = {1, 1};
    return switch_user(kNobody) && (r == 0 || setrlimit(RLIMIT_NPROC, &least) == 0);
  };
  for (const RankExit& end : run_prepared(quick_settings(), prepare))
    expect(
        end.result.starts_with("CollectiveError: the ranks of group 'default' cannot share memory; "
                               "rank 1: this process cannot make another thread"),
        end.result);
}

// Runs `body` in a pid namespace of its own, where both ranks have the same pid.
std::string alone(const Body& body, RankContext& me) {
  if (unshare(CLONE_NEWPID) != 0) return "cannot make a pid namespace";
  const pid_t pid = fork();
  if (pid == 0) {
    me.store.post(text("alone/", me.rank), attempt([&] { return body(me); }));
    _exit(0);
  }
  if (me.rank == 1) {
    me.store.read("to be killed", Clock::now() + 20s);
    std::this_thread::sleep_for(100ms);
    kill(pid, SIGKILL);
  }
  waitpid(pid, nullptr, 0);
  return me.rank == 1 ? "" : me.store.read("alone/0", Clock::now() + 1s);
}

void detects_deaths_across_pid_namespaces() {
  for (const std::string how : {"exec", "exit", "kill"}) {
    const auto ends = run(2, quick_settings(), [&](RankContext& mine) {
      const Body body = [&](RankContext& me) {
        Group group(me.store, me.rank, me.world, me.settings);
        expect(getpid() == 1, "not in a pid namespace of its own");
        const auto begin = Clock::now();
        if (me.rank == 1) {
          std::this_thread::sleep_for(300ms);
          me.store.post("to be killed", "");
          if (how == "exec") execl("/bin/sleep", "sleep", "5", nullptr);
          if (how == "exit") _exit(0);
          pause();
        }
        const std::string message = attempt([&] {
          group.await(1, at_run(1), me.context(20s));
          return "nothing";
        });
        const auto waited = Clock::now() - begin;
        expect(waited > 250ms && waited < 1500ms, "detected too early or too late");
        return message;
      };
      return alone(body, mine);
    });
    expect(contains(ends[0].result, "rank 1 (pid 1) died"), how + ": " + ends[0].result);
  }
}

// Runs in a child whose real user is not its effective user.
void accepts_real_and_effective_user() {
  const auto ends = run(1, quick_settings(), [](RankContext&) {
    if (setresuid(kNobody, 0, 0) != 0) return std::string("cannot become another user");
    const FdServer fd_server(UniqueFd(dup(STDERR_FILENO)));
    fetch(fd_server.id(), deadline_after(10s));
    return std::string("right");
  });
  expect_equal(ends[0].result, "right");
}

void names_fd_server_of_other_user() {
  const FdServer fd_server(UniqueFd(dup(STDERR_FILENO)));
  const auto ends = run(1, quick_settings(), [&](RankContext&) {
    return attempt([&] {
      if (!switch_user(kNobody)) return "cannot become another user";
      fetch(fd_server.id(), deadline_after(10s));
      return "nothing";
    });
  });
  expect(contains(ends[0].result, "is run by another user"), ends[0].result);
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  if (geteuid() != 0)
    return std::puts("isolation_test: SKIPPED: no right to become another user"), 0;
  const std::pair<const char*, void (*)()> tests[] = {
      {"names users", names_users},
      {"works where root fetches", works_where_root_fetches},
      {"works as another user", works_as_another_user},
      {"works in user namespaces", works_in_user_namespaces},
      {"names networks", names_networks},
      {"works without /dev/shm", works_without_shm},
      {"names rank without threads", names_rank_without_threads},
      {"detects deaths across pid namespaces", detects_deaths_across_pid_namespaces},
      {"accepts real and effective user", accepts_real_and_effective_user},
      {"names fd server of other user", names_fd_server_of_other_user},
  };
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("isolation_test: all good");
}
