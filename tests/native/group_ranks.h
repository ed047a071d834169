// Runs a body once per rank, each in a forked process, and reports how every process ended.
// FaultyStore is a store that falsifies values, for fault injection.
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <source_location>

#include "../../csrc/group/group.h"
#include "stores.h"

namespace pycollect::ipc {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

[[noreturn]] inline void fail(const std::string& why, std::source_location at) {
  std::fprintf(stderr, "FAILED: %s:%u: %s\n", at.file_name(), at.line(), why.c_str());
  std::exit(1);
}
inline void expect(bool ok, const std::string& why,
                   std::source_location at = std::source_location::current()) {
  if (!ok) fail(why, at);
}
inline void expect_equal(const std::string& got, const std::string& wanted,
                         std::source_location at = std::source_location::current()) {
  if (got != wanted) fail(text("got    ", got, "\n        wanted ", wanted), at);
}
inline bool contains(const std::string& whole, const std::string& part) {
  return whole.find(part) != std::string::npos;
}

using Falsify = std::function<std::string(const std::string& key, const std::string& value)>;

class FaultyStore final : public Store {
 public:
  FaultyStore(Store& store, Falsify on_post, Falsify on_read = {})
      : store_(store), on_post_(std::move(on_post)), on_read_(std::move(on_read)) {}
  void post(const std::string& key, const std::string& value) override {
    store_.post(key, on_post_ ? on_post_(key, value) : value);
  }
  std::string read(const std::string& key, Deadline deadline) override {
    const std::string value = store_.read(key, deadline);
    return on_read_ ? on_read_(key, value) : value;
  }

 private:
  Store& store_;
  Falsify on_post_, on_read_;
};

class TemporaryFolder {  // temporary folder of a test, removed with this object
 public:
  TemporaryFolder() : path_(fs::temp_directory_path() / "pycollect_group_XXXXXX") {
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

struct RankContext {
  Rank rank;
  int world;
  Store& store;
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
  return attempt([&] {
    body();
    return "nothing";
  });
}

[[noreturn]] inline void run_rank(Rank rank, int world, const std::string& folder,
                                  const GroupSettings& settings, const Body& body) {
  alarm(120);  // ends a rank that hangs; no test takes that long
  FileStore store(folder);
  RankContext me{rank, world, store, settings};
  store.post(text("result/", rank), attempt([&] { return body(me); }));
  _exit(0);
}

inline std::vector<RankExit> run(int world, const GroupSettings& settings, const Body& body) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  const auto begin = Clock::now();
  std::vector<pid_t> pids;
  for (Rank r = 0; r < world; ++r) {
    const pid_t pid = fork();
    if (pid == 0) run_rank(r, world, folder.path(), settings, body);
    pids.push_back(pid);
  }
  std::vector<RankExit> ends(world);
  for (int i = 0; i < world; ++i) {
    int status = 0;
    const pid_t pid = ::wait(&status);
    const Rank r = std::find(pids.begin(), pids.end(), pid) - pids.begin();
    ends.at(r) = {"", Clock::now() - begin, WIFSIGNALED(status)};
    if (!WIFSIGNALED(status)) ends[r].result = store.read(text("result/", r), Clock::now() + 1s);
  }
  return ends;
}

inline int count_entries(const char* folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

inline GroupSettings quick_settings() {
  GroupSettings settings;
  settings.buffer_bytes = 4096;
  settings.timeout = 20s;
  return settings;
}

// In each round, every rank reads the values that each rank has written into its staging buffer.
// Returns "right", or the first round with a wrong value.
inline std::string exchange_rounds(Group& g, int rounds) {
  for (int i = 1; i <= rounds; ++i) {
    const OpContext now{"exchange", static_cast<uint64_t>(i), Clock::now() + 30s};
    for (Rank r = 0; r < g.world(); ++r) g.await(r, at_run(i - 1), now);
    auto* mine = reinterpret_cast<uint64_t*>(g.staging_buffer(g.rank(), i));
    mine[0] = mine[511] = 1000 * i + g.rank();
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

inline std::string join_and_exchange(RankContext& me) {
  Group group(me.store, me.rank, me.world, me.settings);
  return exchange_rounds(group, 50);
}

}  // namespace pycollect::ipc
