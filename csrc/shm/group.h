// The ranks of one group, each a process of the same host: the memory that they share, who is
// still alive, and how one waits for another without hanging when it is not.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "board.h"
#include "layout.h"
#include "segment.h"
#include "wait.h"

namespace pycollect::shm {

// How processes come to share memory, and how one learns of another's death: the best that works
// is taken, and each can be named (PYCOLLECT_SHM_SHARE, PYCOLLECT_SHM_WATCH).
enum class Share : uint8_t { best, memfd, named };   // over a Unix socket; through /dev/shm
enum class Watch : uint8_t { best, pidfd, hangup };  // hangup: a pipe, and a pulse beside it

struct Settings {
  std::string name = "default";  // of the group, for messages
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  std::size_t slot_bytes = 512 << 10;
  std::size_t mailbox_bytes = 0;
  std::size_t arena_bytes = 0;
  Share share = Share::best;
  Watch watch = Watch::best;
  int cores = 0;  // that the ranks share; 0: those this process may run on
};

class Group {
 public:
  // Returns when all ranks share the memory and have read each other's nonce in it. Throws, on all
  // ranks alike and naming hosts, std::invalid_argument when they are not processes of one host;
  // Timeout, naming who is missing.
  Group(Board& board, Rank rank, int world, Settings settings);
  ~Group();  // never throws; whoever still waits for this rank learns that it has left
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Rank rank() const { return rank_; }
  int world() const { return world_; }
  const Settings& settings() const { return settings_; }
  const Layout& layout() const { return layout_; }
  Line& line(Rank r) const;
  Description& description(Rank r, uint64_t call) const;
  std::byte* slot(Rank r, uint64_t run) const;
  std::byte* mailboxes() const;
  std::byte* arena(Rank r) const;
  // What keeps the memory mapped: whoever hands out parts of the arena holds it.
  const std::shared_ptr<Segment>& segment() const { return segment_; }

  // Moves this rank's counter, and wakes who sleeps for it.
  void advance(uint64_t done);
  // What was last seen of `r`'s counter; looks again only when that is not enough.
  bool has_reached(Rank r, uint64_t wanted);
  // Waits for it. Throws PeerLost when the rank has died or left, Timeout when the time is over:
  // either names the operation and everybody who is missing, breaks the group for all, and is
  // thrown again by whatever is tried with it afterwards.
  void await(Rank r, uint64_t wanted, const Occasion& occasion);
  // The same for any condition: `ready` may hold at any time that something else in the shared
  // memory changes; `missing` names whom it depends on. Sleeps at most briefly: nobody wakes it.
  void await(const std::function<bool()>& ready, const std::function<std::vector<Rank>()>& missing,
             const Occasion& occasion);

  // Throws what broke the group, or that this process is a forked child of the rank's.
  void require_whole(const Occasion& occasion) const;
  // Breaks it, from any thread: everybody who waits raises.
  void abort(const std::string& why);
  void set_timeout(std::chrono::milliseconds timeout) { settings_.timeout = timeout; }

 private:
  class Peers;  // life.cpp
  Rank rank_;
  int world_;
  Settings settings_;
  Layout layout_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Peers> peers_;
  std::vector<uint64_t> seen_;  // [rank]: of its counter
  pid_t owner_;                 // the process that this is a rank of
};

}  // namespace pycollect::shm
