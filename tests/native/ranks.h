// Runs a body once per rank and reports how every rank ended. Ranks are forked processes or, where
// a sanitizer must see how they interact, threads of one mapping.
#pragma once
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "../../csrc/group/group.h"
#include "expect.h"
#include "file_store.h"

namespace pycollect::ipc {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

class TemporaryFolder {  // temporary folder of a test, removed with this object
 public:
  TemporaryFolder() : path_(fs::temp_directory_path() / "pycollect_test_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) std::abort();
    fs::permissions(path_, fs::perms::all);  // for ranks that switch to another user
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline void write(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << content << '\n';
}

struct RankContext {
  Rank rank;
  int world;
  FileStore& store;
  GroupSettings settings;
  OpContext context(std::chrono::milliseconds timeout) const {
    return {"all_reduce", 17, Clock::now() + timeout};
  }
};

struct RankExit {
  std::string result;  // the body's return value, or its exception, as in "Timeout: ..."
  std::chrono::duration<double> elapsed;
  bool killed;
};

using Body = std::function<std::string(RankContext&)>;

inline std::string attempt(const std::function<std::string()>& body) {
  try {
    return body();
  } catch (const Timeout& error) {
    return text("Timeout: ", error.what());
  } catch (const PeerLost& error) {
    return text("PeerLost: ", error.what());
  } catch (const CollectiveError& error) {
    return text("CollectiveError: ", error.what());
  } catch (const std::invalid_argument& error) {
    return text("invalid_argument: ", error.what());
  } catch (const std::exception& error) {
    return text("exception: ", error.what());
  }
}

inline std::string refusal(const std::function<void()>& body) {
  return attempt([&] { return body(), "nothing"; });
}

// Runs `body` in a child process, in which nothing may fail.
inline void expect_in_child(const std::function<void()>& body,
                            std::source_location at = std::source_location::current()) {
  const pid_t pid = fork();
  if (pid == 0) alarm(60), body(), _exit(0);
  int status = 0;
  waitpid(pid, &status, 0);
  expect(status == 0, text("a child ended with ", status), at);
}

inline std::vector<RankExit> run(int world, const GroupSettings& settings, const Body& body) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  const auto begin = Clock::now();
  std::vector<pid_t> pids;
  for (Rank r = 0; r < world; ++r) {
    pids.push_back(fork());
    if (pids.back() != 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(120);  // ends a rank that hangs; no test takes that long
    FileStore own = store;
    RankContext me{r, world, own, settings};
    store.post(text("result/", r), attempt([&] { return body(me); }));
    _exit(0);
  }
  std::vector<RankExit> ends(world);
  for (int i = 0; i < world; ++i) {
    int status = 0;
    const pid_t pid = ::wait(&status);
    const Rank r = std::find(pids.begin(), pids.end(), pid) - pids.begin();
    ends.at(r) = {"", Clock::now() - begin, WIFSIGNALED(status)};
    if (!ends[r].killed) ends[r].result = store.read(text("result/", r), Clock::now() + 1s);
  }
  return ends;
}

inline std::vector<RankExit> run_threads(int world, GroupSettings settings, const Body& body) {
  const SegmentLayout layout({world, settings.buffer_bytes, settings.mailbox_bytes,
                              settings.symmetric_heap_bytes, settings.exposed_bytes});
  settings.segment = Segment::create(layout.total);
  const TemporaryFolder folder;
  std::vector<RankExit> ends(world);
  std::vector<std::jthread> threads;
  for (Rank r = 0; r < world; ++r)
    threads.emplace_back([&, r] {
      FileStore store(folder.path());
      RankContext me{r, world, store, settings};
      ends[r].result = attempt([&] { return body(me); });
    });
  threads.clear();
  return ends;
}

inline void expect_each(const std::vector<RankExit>& ends, const std::string& wanted,
                        std::source_location at = std::source_location::current()) {
  for (const RankExit& end : ends)
    if (!end.killed) expect_equal(end.result, wanted, at);
}
inline void expect_each_part(const std::vector<RankExit>& ends, const std::string& part,
                             std::source_location at = std::source_location::current()) {
  for (const RankExit& end : ends) {
    if (!end.killed) expect_part(end.result, part, at);
    expect(end.elapsed < 5s, "took too long", at);
  }
}

inline int count_entries(const char* folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

inline GroupSettings quick_settings(std::chrono::milliseconds timeout = 20s) {
  GroupSettings settings;
  settings.buffer_bytes = 4096;
  settings.timeout = timeout;
  return settings;
}

// In each of 50 rounds, every rank reads the values that each rank has written into its staging
// buffer. Returns "right", or the first round with a wrong value.
inline std::string exchange(Group& g, std::chrono::milliseconds delay = 0ms) {
  for (int i = 1; i <= 50; ++i) {
    const OpContext now{"exchange", static_cast<uint64_t>(i), Clock::now() + 30s};
    for (Rank r = 0; r < g.world(); ++r) g.await(r, at_run(i - 1), now);
    auto* mine = reinterpret_cast<uint64_t*>(g.staging_buffer(g.rank(), i));
    mine[0] = mine[511] = 1000 * i + g.rank();
    if (i % g.world() == g.rank()) std::this_thread::sleep_for(delay);
    g.advance(at_run(i) + 1);
    for (Rank r = 0; r < g.world(); ++r) {
      g.await(r, at_run(i) + 1, now);
      const auto* its = reinterpret_cast<const uint64_t*>(g.staging_buffer(r, i));
      const uint64_t wanted = 1000 * i + r;
      if (its[0] != wanted || its[511] != wanted) return text("wrong in round ", i);
    }
    g.advance(at_run(i + 1));
  }
  return "right";
}

inline std::string join(RankContext& me) {
  Group group(me.store, me.rank, me.world, me.settings);
  return exchange(group);
}
}  // namespace pycollect::ipc
