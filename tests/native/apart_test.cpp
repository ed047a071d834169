// Ranks that the kernel keeps apart: processes of several users, and in namespaces of their own.
// Each raises an error that says which, or the group works.
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>

#include <cerrno>
#include <cstring>

#include "../../csrc/shm/hatch.h"
#include "../../csrc/shm/outlet.h"
#include "group_ranks.h"

namespace pycollect::shm {
namespace {

constexpr uid_t kNobody = 65534, kSomebody = 65533;

// What becomes of two ranks, of which each is put where `place` says first.
std::vector<End> meet(const Settings& settings, const std::function<bool(Rank)>& place) {
  return run(2, settings, [&](Me& me) {
    if (!place(me.rank)) return text("cannot be put there: ", std::strerror(errno));
    Group group(me.board, me.rank, me.world, me.settings);
    group.advance(at_run(1));
    group.await(1 - me.rank, at_run(1), me.occasion(10s));
    return std::string("right");
  });
}

bool become(uid_t user) { return setresuid(user, user, user) == 0; }

// A folder of shared memory of its own.
bool leave_shm() {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64m") == 0;
}

void names_users() {
  const auto ends = meet(quick(), [](Rank r) { return become(r == 0 ? kNobody : kSomebody); });
  for (const End& end : ends) {
    expect(end.said.starts_with("CollectiveError: "), end.said);
    expect(end.said.ends_with("; rank 0 is run by user 65534, rank 1 by user 65533, and all ranks "
                              "need the same user"),
           end.said);
  }
}

// Root may open what is another user's; the other may not, and hears why.
void works_where_root_opens() {
  for (const End& end : meet(quick(), [](Rank r) { return r == 1 || become(kNobody); }))
    expect_equal(end.said, "right");
  for (const End& end : meet(quick(), [](Rank r) { return r == 0 || become(kNobody); }))
    expect(contains(end.said, "; rank 0 is run by user 0, rank 1 by user 65534, and"), end.said);
}

// Nor may they look at each other's memory, as ranks that are begun by their user may.
void works_as_another_user() {
  for (Share share : kShares)
    for (Watch watch : kWatches) {
      Settings settings = quick();
      settings.share = share, settings.watch = watch;
      for (const End& end : meet(settings, [](Rank) { return become(kNobody); }))
        expect_equal(end.said, "right");
    }
}

// Leaves for a namespace in which this process's user is number 7 and nobody else has one.
bool rename_user(uid_t user) {
  if (unshare(CLONE_NEWUSER) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) return false;
  std::ofstream("/proc/self/uid_map") << "7 " << user << " 1";
  return getuid() == 7;
}

void works_in_user_namespaces() {
  for (const End& end : meet(quick(), [](Rank r) { return r == 0 || rename_user(0); }))
    expect_equal(end.said, "right");
  const auto other = [](Rank r) { return r == 0 || (become(kNobody) && rename_user(kNobody)); };
  for (const End& end : meet(quick(), other))
    expect(contains(end.said,
                    "; rank 0 is in another user namespace than rank 1, and both must "
                    "be the same user of the host"),
           end.said);
}

void names_what_is_not_shared() {
  const auto ends = meet(quick(), [](Rank) { return unshare(CLONE_NEWNET) == 0 && leave_shm(); });
  for (const End& end : ends) {
    expect(contains(end.said,
                    "cannot share memory in either of two ways, of which one is enough; "
                    "memfd: rank 0: cannot reach another rank's Unix socket, which must "
                    "be in the same network namespace: "),
           end.said);
    expect(contains(end.said, " in /dev/shm, which must be the same for all ranks: "), end.said);
  }
  for (const End& end : meet(quick(), [](Rank) { return unshare(CLONE_NEWNET) == 0; }))
    expect_equal(end.said, "right");
  for (const End& end : meet(quick(), [](Rank) { return leave_shm(); }))
    expect_equal(end.said, "right");
}

// Process numbers are 1 and 2 for these ranks, and others in the /proc that they see.
void notices_another_program_by_a_foreign_proc() {
  const pid_t pid = fork();
  if (pid == 0) {
    expect(unshare(CLONE_NEWPID) == 0, "cannot make a pid namespace");
    const auto ends = run(2, quick(), [](Me& me) {
      me.settings.watch = Watch::pidfd;
      Group group(me.board, me.rank, me.world, me.settings);
      const auto begin = Clock::now();
      if (me.rank == 1) execl("/bin/sleep", "sleep", "5", nullptr);
      const std::string said = attempt([&] {
        group.await(1, at_run(1), me.occasion(20s));
        return "nothing";
      });
      expect(Clock::now() - begin < 3s, "was noticed when the other program had ended");
      return said;
    });
    expect(contains(ends[0].said, "rank 1 (pid 2) died"), ends[0].said);
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  expect(status == 0, "see above");
}

// In a child with a real user that is not the effective one: the kernel says the one of who sends a
// letter, and the other of who connects.
void takes_either_user_for_its_own() {
  const auto ends = run(1, quick(), [](Me&) {
    if (setresuid(kNobody, 0, 0) != 0) return std::string("cannot become another user");
    Hatch hatch;
    hand_in(hatch.address(), STDERR_FILENO, 7);
    hatch.take(7);
    Outlet outlet;
    fetch(outlet.offer(Descriptor(dup(STDERR_FILENO))));
    return std::string("right");
  });
  expect_equal(ends[0].said, "right");
}

void says_whose_outlet_it_is() {
  Outlet outlet;
  const auto ticket = outlet.offer(Descriptor(dup(STDERR_FILENO)));
  const auto ends = run(1, quick(), [&](Me&) {
    return attempt([&] {
      if (!become(kNobody)) return "cannot become another user";
      fetch(ticket);
      return "nothing";
    });
  });
  expect(contains(ends[0].said, "is run by another user"), ends[0].said);
}

}  // namespace
}  // namespace pycollect::shm

int main() {
  using namespace pycollect::shm;
  if (geteuid() != 0) return std::puts("apart_test: SKIPPED: no right to become another user"), 0;
  const std::pair<const char*, void (*)()> tests[] = {
      {"names users", names_users},
      {"works where root opens", works_where_root_opens},
      {"works as another user", works_as_another_user},
      {"works in user namespaces", works_in_user_namespaces},
      {"names what is not shared", names_what_is_not_shared},
      {"notices another program by a foreign /proc", notices_another_program_by_a_foreign_proc},
      {"takes either user for its own", takes_either_user_for_its_own},
      {"says whose outlet it is", says_whose_outlet_it_is},
  };
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("apart_test: all good");
}
