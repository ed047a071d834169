// The ranks of one group, each a process of the same host: the memory that they share, who is
// still alive, and how one waits for another without hanging when it is not.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "board.h"
#include "broken.h"
#include "introduction.h"
#include "layout.h"
#include "life.h"
#include "segment.h"
#include "settings.h"
#include "system.h"
#include "wait.h"

namespace pycollect::shm {

class Group {
 public:
  // Returns when all ranks share the memory and have read each other's nonce in it. Throws, on all
  // ranks alike and naming hosts, std::invalid_argument when they are not processes of one host;
  // Timeout, naming who is missing; PeerLost when one has died or given up.
  Group(Board& board, Rank rank, int world, Settings settings);
  ~Group();
  // Whoever still waits for this rank, and has no reason to, learns that it has left.
  void leave() noexcept;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Rank rank() const { return rank_; }
  int world() const { return world_; }
  const Settings& settings() const { return settings_; }
  const Layout& layout() const { return layout_; }
  Line& line(Rank r) const { return lines_[r]; }
  Description& description(Rank r, uint64_t call) const;
  std::byte* slot(Rank r, uint64_t run) const { return base_ + layout_.slot(r, run); }
  std::byte* mailboxes() const { return base_ + layout_.mailboxes; }
  std::byte* deck() const { return base_ + layout_.deck; }  // whole pages
  std::byte* arena(Rank r) const { return base_ + layout_.arena(r); }
  // What keeps the memory mapped: whoever hands out parts of the arena holds it.
  const std::shared_ptr<Segment>& segment() const { return segment_; }

  // Moves this rank's counter, and wakes who sleeps for it.
  void advance(uint64_t done);
  // What was last seen of `r`'s counter; looks again only when that is not enough.
  bool has_reached(Rank r, uint64_t wanted);
  // Waits for it. Throws PeerLost when the rank has died or left, Timeout when the time is over:
  // either names the operation and everybody who is missing, breaks the group for all, and is
  // thrown again by whatever is tried with it afterwards. So does the death of any other rank that
  // has not finished the run.
  void await(Rank r, uint64_t wanted, const Occasion& occasion);
  // The same for any condition: `ready` may hold at any time that something else in the shared
  // memory changes; `missing` names whom it depends on. Sleeps at most briefly: nobody wakes it.
  // `rest`, if given, is what it does instead, for some milliseconds at the most.
  void await(const std::function<bool()>& ready, const std::function<std::vector<Rank>()>& missing,
             const Occasion& occasion, const std::function<void()>& rest = {});
  // Only the first stage of that: spins for as long as it makes sense on the cores there are.
  bool spin_for(const std::function<bool()>& ready);

  // A bit for each rank that has died, has destroyed its group, or either.
  uint64_t dead() const { return peers_->dead(); }
  uint64_t left() const;
  uint64_t gone() const { return dead() | left(); }

  bool is_whole() const { return !broken_->yes(); }
  // Throws what broke the group, or that this process is a forked child of the rank's.
  void require_whole(const Occasion& occasion) const;
  // Breaks it, from any thread: everybody who waits raises.
  void abort(const std::string& why);

 private:
  class Lookout;  // await.cpp
  void meet(Board& board);
  void adopt(std::shared_ptr<Segment> segment);
  void commit();
  void require_one_memory(const std::vector<Introduction>& ranks) const;
  int32_t note_core();
  bool shares_core();
  bool holds_up(Rank awaited);
  std::vector<Rank> behind(uint64_t goal) const;
  std::vector<Rank> last_behind(uint64_t goal) const;
  void sleep_for(Rank r, uint64_t wanted, std::chrono::nanoseconds at_most);
  void await_slowly(Rank r, uint64_t wanted, const Occasion& occasion);
  void wake_everybody() const;

  Rank rank_;
  int world_;
  Settings settings_;
  Layout layout_;
  Origin origin_;         // the process that this is a rank of
  bool crowded_ = false;  // more ranks than cores
  std::shared_ptr<Segment> segment_;
  std::byte* base_ = nullptr;
  Line* lines_ = nullptr;
  std::unique_ptr<Broken> broken_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<std::atomic<uint64_t>[]> seen_;  // [rank]: of its counter
};

// The store and the look at the sleepers must not pass each other: who falls asleep counts himself
// first and looks at the counter then, so one of the two sees the other.
inline void Group::advance(uint64_t done) {
  Line& mine = lines_[rank_];
  mine.done.store(done, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) [[unlikely]]
    wake_sleepers(mine.done);
}

// What was seen is handed on with what was seen before it, from thread to thread.
inline bool Group::has_reached(Rank r, uint64_t wanted) {
  if (reached(seen_[r].load(std::memory_order_acquire), wanted)) return true;
  const uint64_t done = lines_[r].done.load(std::memory_order_acquire);
  seen_[r].store(done, std::memory_order_release);
  return reached(done, wanted);
}

inline void Group::await(Rank r, uint64_t wanted, const Occasion& occasion) {
  if (!has_reached(r, wanted)) await_slowly(r, wanted, occasion);
}

}  // namespace pycollect::shm
