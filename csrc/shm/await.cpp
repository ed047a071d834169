// The slow half of Group::await: what to look at while time passes, and what to say when it fails.
#include <algorithm>
#include <cstdio>
#include <thread>

#include "group.h"
#include "ranks.h"

namespace pycollect::shm {
namespace {

// A wait that nobody ends by a wake-up sleeps for a part of the time that it has lasted already: a
// fiftieth is lost at most, and a long one takes no core. A shorter sleep is no shorter: the
// kernel's timers are 50 us late.
constexpr int kWaitedPerNap = 50;
constexpr std::chrono::microseconds kShortestNap{50};
constexpr std::chrono::milliseconds kLongestNap{2};

std::string seconds(std::chrono::nanoseconds time) {
  std::array<char, 32> digits;
  std::snprintf(digits.data(), digits.size(), "%.1f s",
                std::chrono::duration<double>(time).count());
  return digits.data();
}

}  // namespace

// One wait's look at the rest of the world.
class Group::Lookout {
 public:
  using Suspects = std::function<std::vector<Rank>()>;
  // `suspects` whose death makes the wait vain, at the time of asking; `late` whom to name when the
  // time is over.
  struct Question {
    std::function<bool()> ready;
    Suspects suspects, late;
  };
  Lookout(Group& group, const Question& question, const Occasion& occasion)
      : group_(group), question_(question), occasion_(occasion) {}

  // Throws when there is nothing more to wait for.
  void look(Deadline now) {
    if (group_.broken_->yes()) group_.broken_->rethrow(occasion_);
    const uint64_t dead = group_.peers_->dead();
    const uint64_t left = group_.left() & ~dead & ~(uint64_t{1} << group_.rank_);
    if ((dead | left) != 0) look_for(dead, left);
    if (now >= occasion_.deadline) time_out(now);
  }

  std::chrono::nanoseconds rest() const { return occasion_.deadline - Clock::now(); }

 private:
  // A rank that is gone does not matter when it did its part before, so that is asked afterwards.
  void look_for(uint64_t dead, uint64_t left) {
    std::vector<Rank> died, went;
    for (Rank r : question_.suspects()) {
      if ((dead >> r & 1) != 0 && group_.lines_[r].left.load() == 0)
        died.push_back(r);
      else if (((dead | left) >> r & 1) != 0)
        went.push_back(r);
    }
    if ((died.empty() && went.empty()) || question_.ready()) return;
    fail(Breakage::lost,
         died.empty() ? text(name(went), went.size() == 1 ? " has" : " have", " left the group")
                      : text(with_pids(died), " died", alive(dead | left)));
  }

  std::string with_pids(const std::vector<Rank>& ranks) const {
    std::string pids;
    for (Rank r : ranks) pids += text(pids.empty() ? "" : ", ", group_.peers_->pid(r));
    return text(name(ranks), ranks.size() == 1 ? " (pid " : " (pids ", pids, ")");
  }

  std::string alive(uint64_t gone) const {
    std::vector<Rank> alive;
    for (Rank r = 0; r < group_.world_; ++r)
      if ((gone >> r & 1) == 0) alive.push_back(r);
    return text("; ", name(alive), alive.size() == 1 ? " is" : " are", " alive");
  }

  void time_out(Deadline now) {
    const std::vector<Rank> late = question_.late();
    if (question_.ready()) return;
    const std::string who = late.empty() ? "" : text("; ", name(late), " did not arrive");
    fail(Breakage::timed_out, text("timed out after ", seconds(now - begin_), who));
  }

  [[noreturn]] void fail(uint32_t kind, const std::string& cause) {
    group_.broken_->say(kind, cause, &occasion_);
    group_.wake_everybody();
    group_.broken_->rethrow(occasion_);
  }

  Group& group_;
  const Question& question_;
  const Occasion& occasion_;
  Deadline begin_ = Clock::now();
};

void Group::await_slowly(Rank r, uint64_t wanted, const Occasion& occasion) {
  const auto ready = [&] { return has_reached(r, wanted); };
  if (!crowded_ && spin(false, ready, [&] { return holds_up(r); })) return;
  // The run that `wanted` is in must be finished by all who ever began it, or nobody goes on.
  const uint64_t end = at_run(((wanted - 1) >> kTaskBits) + 1);
  const Lookout::Question question{ready, [&] { return behind(end); },
                                   [&] { return last_behind(wanted); }};
  Lookout lookout(*this, question, occasion);
  wait(
      ready, [&] { return !crowded_ || holds_up(r); }, [&](Deadline now) { lookout.look(now); },
      [&](std::chrono::nanoseconds) {
        sleep_for(r, wanted, std::min<std::chrono::nanoseconds>(kSleeping, lookout.rest()));
      });
}

std::vector<Rank> Group::behind(uint64_t goal) const {
  std::vector<Rank> ranks;
  for (Rank r = 0; r < world_; ++r)
    if (r != rank_ && !reached(lines_[r].done.load(std::memory_order_acquire), goal) &&
        !reached(lines_[r].ended.load(std::memory_order_acquire), goal))
      ranks.push_back(r);
  return ranks;
}

// Those who are behind all others, too: the rest may only wait for them.
std::vector<Rank> Group::last_behind(uint64_t goal) const {
  std::vector<Rank> last;
  uint64_t least = goal;
  for (Rank r = 0; r < world_; ++r) {
    const uint64_t done = lines_[r].done.load(std::memory_order_acquire);
    if (r == rank_ || reached(done, goal)) continue;
    if (done != least && reached(least, done)) last.clear(), least = done;
    if (done == least) last.push_back(r);
  }
  return last;
}

// Where this rank runs, as `on_core` has it.
int32_t Group::note_core() {
  const int32_t here = sched_getcpu() + 1;
  std::atomic<int32_t>& mine = lines_[rank_].on_core;
  if (mine.load(std::memory_order_relaxed) != here) mine.store(here, std::memory_order_relaxed);
  return here;
}

// Two ranks on one core, because something else has the other: while one spins there the other
// cannot come, and the scheduler sees no reason to part them.
bool Group::shares_core() {
  const int32_t here = note_core();
  for (Rank r = 0; r < world_; ++r)
    if (r != rank_ && lines_[r].on_core.load(std::memory_order_relaxed) == here) return true;
  return false;
}

// Does somebody need this core to get as far as this rank is? If not, all that share it wait like
// this one, most often for the same rank: it has another core, and is there before each of them has
// had a turn to see that it is not. So a core changes hands once for each of its ranks in a call (2
// to 8 ranks on 2 cores), and 4 ranks' small all_reduce is a quarter faster, in Python a third.
bool Group::holds_up(Rank awaited) {
  const int32_t here = note_core();
  const uint64_t own = lines_[rank_].done.load(std::memory_order_relaxed);
  for (Rank r = 0; r < world_; ++r)
    if (r != rank_ && lines_[r].on_core.load(std::memory_order_relaxed) == here &&
        (r == awaited || !reached(lines_[r].done.load(std::memory_order_acquire), own)))
      return true;
  return false;
}

void Group::sleep_for(Rank r, uint64_t wanted, std::chrono::nanoseconds at_most) {
  Line& line = lines_[r];
  line.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = line.done.load(std::memory_order_seq_cst);
  if (!reached(seen, wanted) && !broken_->yes()) sleep_on(line.done, seen, at_most);
  line.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

bool Group::spin_for(const std::function<bool()>& ready) {
  return spin(crowded_, ready, [this] { return shares_core(); });
}

void Group::await(const std::function<bool()>& ready,
                  const std::function<std::vector<Rank>()>& missing, const Occasion& occasion,
                  const std::function<void()>& rest) {
  if (spin_for(ready)) return;
  const Lookout::Question question{ready, missing, missing};
  Lookout lookout(*this, question, occasion);
  wait(
      ready, [] { return true; }, [&](Deadline now) { lookout.look(now); },
      [&](std::chrono::nanoseconds waited) {
        if (rest) return rest();
        std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>(
            waited / kWaitedPerNap, kShortestNap, kLongestNap));
      });
}

}  // namespace pycollect::shm
