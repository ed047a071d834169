// Runs a test's body once per rank, with a group and a mailbox. Ranks are threads of one mapping,
// where a sanitizer sees how they interact, or forked processes.
#pragma once
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <source_location>

#include "../../csrc/send_recv/mailbox.h"
#include "stores.h"

namespace pycollect::ipc {

inline void check(bool ok, const std::string& what = "",
                  std::source_location at = std::source_location::current()) {
  if (!ok) throw std::logic_error(text("line ", at.line(), ": ", what));
}

struct Member {
  Group& group;
  Mailbox& box;
  Rank rank, world;

  OpContext context(std::chrono::milliseconds most = std::chrono::seconds(60)) const {
    return {"recv", 7, Clock::now() + most};
  }
  void wait(const TransferPtr& transfer) const { box.wait(*transfer, context()); }
  // A wait for something of this rank: it goes on when a peer has left.
  void wait(const std::function<bool()>& holds) const {
    box.wait({holds, [] { return std::vector<Rank>(); }}, context());
  }
};
using Body = std::function<void(const Member&)>;

using Bytes = std::vector<std::byte>;

inline Bytes pattern(std::size_t bytes, uint64_t seed) {
  Bytes data(bytes + sizeof(uint64_t));
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    const uint64_t next = random();
    std::memcpy(data.data() + i, &next, sizeof next);
  }
  data.resize(bytes);
  return data;
}

inline Envelope envelope(std::size_t bytes, uint32_t tag = 0, uint8_t dtype = 1) {
  return {bytes, dtype, tag};
}

inline GroupSettings mailbox_settings(int world) {
  GroupSettings settings;
  settings.buffer_bytes = 64;
  settings.mailbox_bytes = Mailbox::bytes(world);
  settings.mailbox_header_bytes = Mailbox::header_bytes(world);
  settings.timeout = std::chrono::seconds(60);
  return settings;
}

inline void run_rank(Store& store, Rank rank, const GroupSettings& settings, int world,
                     const Body& body) {
  Group group(store, rank, world, settings);
  Mailbox box(group);
  body({group, box, rank, world});
}

inline void run_threads(int world, const Body& body) {
  GroupSettings settings = mailbox_settings(world);
  const SegmentLayout layout({world, settings.buffer_bytes, settings.mailbox_bytes, 0});
  settings.segment = Segment::create(layout.total);
  MapStore store;
  std::vector<std::exception_ptr> errors(world);
  {
    std::vector<std::jthread> threads;
    for (Rank r = 0; r < world; ++r)
      threads.emplace_back([&, r] {
        try {
          run_rank(store, r, settings, world, body);
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
  }
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

// `killed` is the rank that must end by a signal.
inline void run_processes(int world, const Body& body, Rank killed = -1) {
  std::string folder = std::filesystem::temp_directory_path() / "mailbox_test_XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) throw std::runtime_error("mkdtemp");
  std::vector<pid_t> pids;
  for (Rank r = 0; r < world; ++r) {
    if (const pid_t pid = fork(); pid != 0) {
      pids.push_back(pid);
      continue;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int status = 0;
    try {
      FileStore store(folder);
      run_rank(store, r, mailbox_settings(world), world, body);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", r, error.what());
      status = 1;
    }
    _exit(status);
  }
  bool ok = true;
  for (Rank r = 0; r < world; ++r) {
    int status = 0;
    waitpid(pids[r], &status, 0);
    ok &= r == killed ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  std::filesystem::remove_all(folder);
  if (!ok) throw std::logic_error("a rank failed");
}

}  // namespace pycollect::ipc
