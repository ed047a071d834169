// How ranks come to share memory: every way of it, who is told what when it does not work, and that
// nothing is left of it.
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>

#include <random>

#include "../../csrc/shm/introduction.h"
#include "group_ranks.h"

namespace pycollect::shm {
namespace {

// What each rank wrote into its slots is read by all, for many turns.
std::string exchange(Group& g, int turns) {
  for (int i = 1; i <= turns; ++i) {
    const Occasion now{"exchange", static_cast<uint64_t>(i), Clock::now() + 30s};
    for (Rank r = 0; r < g.world(); ++r) g.await(r, at_run(i - 1), now);
    auto* mine = reinterpret_cast<uint64_t*>(g.slot(g.rank(), i));
    mine[0] = mine[511] = 1000 * i + g.rank();
    g.advance(at_run(i) + 1);
    for (Rank r = 0; r < g.world(); ++r) {
      g.await(r, at_run(i) + 1, now);
      const auto* its = reinterpret_cast<const uint64_t*>(g.slot(r, i));
      const uint64_t wanted = 1000 * i + r;
      if (its[0] != wanted || its[511] != wanted) return text("wrong in turn ", i);
    }
    g.advance(at_run(i + 1));
  }
  return "right";
}

std::string meet_and_exchange(Me& me) {
  Group group(me.board, me.rank, me.world, me.settings);
  return exchange(group, 50);
}

void meets_in_every_way() {
  for (int world : {1, 2, 3, 8})
    for (Share share : kShares)
      for (Watch watch : kWatches) {
        Settings settings = quick();
        settings.share = share, settings.watch = watch;
        for (const End& end : run(world, settings, meet_and_exchange))
          expect_equal(end.said, "right");
      }
  expect(files_in_shm().empty(), "files are left in /dev/shm");
}

void names_who_does_not_come() {
  Settings settings = quick();
  settings.timeout = 400ms;
  const auto ends =
      run(4, settings, [](Me& me) { return me.rank % 2 == 1 ? "absent" : meet_and_exchange(me); });
  for (Rank r : {0, 2})
    expect_equal(ends[r].said,
                 "Timeout: group 'default': timed out after 0.4 s; ranks 1, 3 did not arrive");
  expect(ends[0].when < 2s, "took too long");
}

// Between the introductions and the memory: the others need not wait for the time limit.
void notices_who_dies_there() {
  for (const char* phase : {"offer-memfd/0", "joined-memfd/0"}) {
    const auto ends = run(3, quick(), [phase](Me& me) {
      LyingBoard board(me.board, [&](const std::string& key, const std::string& value) {
        if (key == phase) kill(getpid(), SIGKILL);
        return value;
      });
      Me other{me.rank, me.world, board, me.settings};
      return meet_and_exchange(other);
    });
    for (Rank r : {1, 2}) {
      expect(contains(ends[r].said, "PeerLost: group 'default': rank 0 (pid "), ends[r].said);
      expect(contains(ends[r].said, ") died before all had come"), ends[r].said);
      expect(ends[r].when < 2s, "took too long");
    }
  }
}

// As rank `liar` would say it with `change` made to the truth.
Body meets_with(Rank liar, const std::function<void(Introduction&)>& change) {
  return [=](Me& me) {
    LyingBoard board(me.board, [&](const std::string& key, const std::string& value) {
      if (me.rank != liar || !key.starts_with("hello")) return value;
      Introduction it = Introduction::decode(value);
      change(it);
      return it.encode();
    });
    Me other{me.rank, me.world, board, me.settings};
    return meet_and_exchange(other);
  };
}

void refuses_several_hosts() {
  const auto ends = run(4, quick(), [](Me& me) {
    LyingBoard board(me.board, [&](const std::string& key, const std::string& value) {
      if (!key.starts_with("hello")) return value;
      Introduction it = Introduction::decode(value);
      it.host = me.rank == 3 ? "b" : "a", it.boot = it.host;
      return it.encode();
    });
    Me other{me.rank, me.world, board, me.settings};
    return meet_and_exchange(other);
  });
  for (const End& end : ends)
    expect_equal(end.said,
                 "invalid_argument: a pycollect group is of one host; in group 'default' ranks 0-2 "
                 "are on a, rank 3 is on b: use gloo (CPU) or nccl (CUDA) between hosts, and a "
                 "pycollect group within each");
}

void refuses_unlike_settings() {
  const auto ends = run(3, quick(), [](Me& me) {
    if (me.rank == 2) me.settings.slot_bytes = 8192;
    return meet_and_exchange(me);
  });
  for (const End& end : ends) {
    expect(contains(end.said, "invalid_argument: the ranks of group 'default' want different ones"),
           end.said);
    expect(contains(end.said, "slot_bytes=4096") && contains(end.said, "slot_bytes=8192"),
           end.said);
  }
}

void goes_another_way() {
  const auto unreachable = [](Introduction& it) { it.hatch = "pycollect-of-another-namespace"; };
  const auto stranger = [](Introduction& it) { it.pid_space = 1; };
  for (const End& end : run(3, quick(), meets_with(2, unreachable)))
    expect_equal(end.said, "right");
  for (const End& end : run(3, quick(), meets_with(1, stranger))) expect_equal(end.said, "right");
  Settings settings = quick();
  settings.share = Share::memfd;
  for (const End& end : run(3, settings, meets_with(2, unreachable)))
    expect_equal(
        end.said,
        "CollectiveError: the ranks of group 'default' cannot share memory; memfd: rank 0: "
        "cannot reach another rank's Unix socket, which must be in the same network namespace: "
        "Connection refused");
  settings = quick();
  settings.watch = Watch::pidfd;
  for (const End& end : run(3, settings, meets_with(1, stranger)))
    expect(contains(end.said, "invalid_argument: the ranks of group 'default' cannot watch"),
           end.said);
}

// Two hosts that the kernel does not tell apart (clones of one virtual machine), with files of the
// same name in /dev/shm.
void proves_one_memory() {
  Settings settings = quick();
  settings.share = Share::named;
  const auto ends = run(3, settings, [](Me& me) {
    std::shared_ptr<Segment> other;
    std::string name;
    LyingBoard board(me.board, {}, [&](const std::string& key, const std::string& value) {
      if (me.rank != 1 || key != "hello/0") return value;
      Introduction it = Introduction::decode(value);
      other = Segment::create_named(name = Segment::name_of(it.nonce ^= 2), 1 << 20);
      return it.encode();
    });
    Me elsewhere{me.rank, me.world, board, me.settings};
    const std::string said = attempt([&] { return meet_and_exchange(elsewhere); });
    if (!name.empty()) Segment::remove_name(name);
    return said;
  });
  for (const End& end : ends) expect(contains(end.said, "were handed different memory"), end.said);
  expect(files_in_shm().empty(), "files are left in /dev/shm");
}

void says_that_shm_is_full() {
  const Folder folder;
  const pid_t pid = fork();
  if (pid == 0) {
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m") != 0)
      _exit(77);
    Settings settings = quick();
    settings.slot_bytes = 1 << 20;
    settings.share = Share::named;
    for (const End& end : run(2, settings, meet_and_exchange)) {
      expect(contains(end.said, "no memory for") && contains(end.said, " of 1 MiB are free"),
             end.said);
      expect(!end.killed, "killed");
    }
    expect(files_in_shm().empty(), "files are left in /dev/shm");
    settings.share = Share::best;  // a file without a name is not in that folder
    for (const End& end : run(2, settings, meet_and_exchange)) expect_equal(end.said, "right");
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  if (WEXITSTATUS(status) == 77)
    std::puts("  SKIPPED: no right to mount a small /dev/shm");
  else
    expect(status == 0, "failed where /dev/shm is full");
}

void leaves_nothing(int cycles) {
  for (Watch watch : kWatches)
    for (Share share : {Share::memfd, Share::named}) {
      Settings settings = quick();
      settings.watch = watch, settings.share = share;
      const Folder boards;
      const auto ends = run(2, settings, [&](Me& me) {
        int files = 0, threads = 0;
        for (int i = 0; i < cycles; ++i) {
          FolderBoard board(text(boards.path(), "/", i));
          Group group(board, me.rank, me.world, me.settings);
          if (const std::string said = exchange(group, 2); said != "right") return said;
          if (i == 2)
            files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
          if (i > 2 && (count_entries("/proc/self/fd") > files ||
                        count_entries("/proc/self/task") > threads))
            return text("grew in cycle ", i);
        }
        return std::string("right");
      });
      for (const End& end : ends) expect_equal(end.said, "right");
      expect(files_in_shm().empty(), "files are left in /dev/shm");
    }
}

// However a job is killed, the next one finds /dev/shm clean or cleans it.
void leaves_nothing_when_killed(int times) {
  std::mt19937 random(1);
  Settings settings = quick();
  settings.timeout = 300ms;
  int left = 0;
  for (int i = 0; i < times; ++i) {
    settings.share = i % 2 == 0 ? Share::named : Share::memfd;
    const bool all = i % 4 < 2;
    const int64_t after = random() % 6000;
    run(3, settings, [&](Me& me) {
      if (all || me.rank == 0)
        std::thread([after] {
          std::this_thread::sleep_for(std::chrono::microseconds(after));
          kill(getpid(), SIGKILL);
        }).detach();
      meet_and_exchange(me);
      std::this_thread::sleep_for(10ms);
      return std::string();
    });
    const auto found = files_in_shm();
    left += !found.empty();
    expect(found.empty() || (all && settings.share == Share::named),
           "whoever is left removes the name");
    for (const std::string& file : found) Segment::remove_name(file);
  }
  const std::shared_ptr<Segment> mine = Segment::create_named(Segment::name_of(1), 4096);
  run(1, settings, [](Me&) {
    Segment::create_named(Segment::name_of(2), 4096);
    return std::string();
  });
  expect(files_in_shm().size() == 2, "two files to begin with");
  settings = quick();
  settings.share = Share::named;
  for (const End& end : run(2, settings, meet_and_exchange)) expect_equal(end.said, "right");
  expect(files_in_shm().size() == 1, "the next group removes what a killed one left, and no other");
  Segment::remove_name(Segment::name_of(1));
  std::printf("  %d of %d killed jobs left a file for the next to remove\n", left, times);
}

}  // namespace
}  // namespace pycollect::shm

int main(int count, char** words) {
  using namespace pycollect::shm;
  const int cycles = count > 1 ? std::atoi(words[1]) : 100;
  const std::pair<const char*, std::function<void()>> tests[] = {
      {"meets in every way", meets_in_every_way},
      {"names who does not come", names_who_does_not_come},
      {"notices who dies there", notices_who_dies_there},
      {"refuses several hosts", refuses_several_hosts},
      {"refuses unlike settings", refuses_unlike_settings},
      {"goes another way", goes_another_way},
      {"proves one memory", proves_one_memory},
      {"says that /dev/shm is full", says_that_shm_is_full},
      {"leaves nothing", [=] { leaves_nothing(cycles); }},
      {"leaves nothing when killed", [=] { leaves_nothing_when_killed(cycles); }},
  };
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("group_test: all good");
}
