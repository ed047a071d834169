#include "meeting.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "../plan/error.h"
#include "ranks.h"

namespace pycollect::shm {
namespace {

// How long to ask a board for what may not be there, once the time is over: for each rank.
constexpr std::chrono::milliseconds kGlance{20};
// How long to wait for an answer before looking who is alive: half the second in which a death must
// be noticed.
constexpr std::chrono::milliseconds kGlances{500};
// How a posted outcome begins; the reason follows.
constexpr char kFine = '+', kFailed = '!';

std::string key(const std::string& phase, Rank rank) { return text(phase, "/", rank); }

// All know the name beforehand and remove it when they are done with it, so whoever is left when
// others are killed does.
struct Name {
  explicit Name(uint64_t number) : name(Segment::name_of(number)) {}
  ~Name() { Segment::remove_name(name); }
  Name(const Name&) = delete;
  Name& operator=(const Name&) = delete;
  const std::string name;
};

}  // namespace

struct Meeting::Way {
  Share share;
  const char* label;
};

Meeting::Meeting(Board& board, Rank rank, int world, const Settings& settings)
    : board_(board),
      rank_(rank),
      world_(world),
      settings_(settings),
      deadline_(deadline_after(settings.timeout)) {
  Introduction mine = introduce(settings, world);
  if (rank != 0 && settings.share != Share::named && !settings.segment) {
    try {
      mine.hatch = hatch_.emplace().address();
    } catch (const std::runtime_error&) {
      hatch_.reset();  // no sockets here: rank 0 hears it, and all go another way
    }
  }
  try {
    board_.post(key("hello", rank), mine.encode());
  } catch (const Timeout&) {  // others write where rank 0 says
    time_out({0});
  }
  for (const std::string& said : read_all("hello", everybody()))
    ranks_.push_back(Introduction::decode(said));
  require_one_host(ranks_, settings.name);
  require_same_terms(ranks_, settings.name);
  if (!can_all_watch(ranks_)) return;
  try {
    watched_ = watch_by_pidfd(pids(ranks_), rank_);
  } catch (const std::runtime_error&) {  // then only the time limit tells of a death
  }
}

std::vector<Rank> Meeting::everybody() const {
  std::vector<Rank> all(world_);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<std::string> Meeting::read_all(const std::string& phase,
                                           const std::vector<Rank>& from) {
  std::vector<std::string> keys;
  for (Rank r : from) keys.push_back(key(phase, r));
  for (;;) {
    try {
      return board_.read_all(keys, std::min(deadline_, Clock::now() + kGlances));
    } catch (const Timeout&) {  // which some boards throw a second late
      if (Clock::now() >= deadline_) break;
    }
    if (watched_) require_all_alive();
    if (hatch_ && !ranks_.empty()) hatch_->sort(ranks_[rank_].nonce);
  }
  std::vector<Rank> missing;
  for (Rank r : from) {
    try {
      board_.read(key(phase, r), Clock::now() + kGlance);
    } catch (const Timeout&) {
      missing.push_back(r);
    }
  }
  time_out(missing);
}

void Meeting::time_out(const std::vector<Rank>& missing) const {
  const std::chrono::duration<double> waited = settings_.timeout;
  throw Timeout(text(
      "group '", settings_.name, "': timed out after ", waited.count(), " s; ",
      missing.empty() ? "the last rank was too late" : text(name(missing), " did not arrive")));
}

void Meeting::require_all_alive() const {
  const uint64_t dead = watched_->dead();
  for (Rank r = 0; r < world_; ++r)
    if ((dead >> r & 1) != 0)
      throw PeerLost(text("group '", settings_.name, "': rank ", r, " (pid ", ranks_[r].pid,
                          ") died before all had come"));
}

void Meeting::share(std::size_t bytes, const Preparation& preparation) {
  constexpr Way kMemfd{Share::memfd, "memfd"}, kNamed{Share::named, "named"};
  if (settings_.segment && attempt({Share::best, "given"}, bytes, preparation)) return;
  if (!settings_.segment && settings_.share != Share::named && attempt(kMemfd, bytes, preparation))
    return;
  if (!settings_.segment && settings_.share != Share::memfd && attempt(kNamed, bytes, preparation))
    return;
  const bool both = !settings_.segment && settings_.share == Share::best;
  throw CollectiveError(text("the ranks of group '", settings_.name, "' cannot share memory",
                             both ? " in either of two ways, of which one is enough" : "",
                             failures_, unlike_users(ranks_)));
}

bool Meeting::attempt(const Way& way, std::size_t bytes, const Preparation& preparation) {
  std::optional<Name> name;
  if (way.share == Share::named) name.emplace(ranks_[0].nonce);
  std::shared_ptr<Segment> segment;
  std::string offered;
  const std::string phase = text("offer-", way.label);
  if (rank_ == 0)
    board_.post(key(phase, 0), offered = offer(way, bytes, segment));
  else
    offered = read_all(phase, {0}).front();
  if (offered.front() == kFailed) {
    failures_ += text("; ", way.label, ": rank 0: ", offered.substr(1));
    return false;
  }
  std::string outcome(1, kFine);
  try {
    if (rank_ != 0) segment = accept(way, bytes);
    preparation(segment);
  } catch (const std::exception& error) {
    outcome = kFailed + std::string(error.what());
  }
  return all_have(way, outcome);
}

// Makes the memory and hands it over. Tells whether it could, or why not.
std::string Meeting::offer(const Way& way, std::size_t bytes, std::shared_ptr<Segment>& segment) {
  try {
    if (way.share == Share::named) {
      segment = Segment::create_named(Segment::name_of(ranks_[0].nonce), bytes);
    } else if (way.share == Share::memfd) {
      segment = Segment::create_unnamed(bytes);
      for (Rank r = 1; r < world_; ++r)
        hand_in(ranks_[r].hatch, segment->descriptor(), ranks_[r].nonce);
    } else {
      segment = settings_.segment;
    }
  } catch (const std::exception& error) {
    return kFailed + std::string(error.what());
  }
  return std::string(1, kFine);
}

std::shared_ptr<Segment> Meeting::accept(const Way& way, std::size_t bytes) {
  if (way.share == Share::named)
    return Segment::open_named(Segment::name_of(ranks_[0].nonce), bytes);
  if (way.share == Share::best) return settings_.segment;
  return Segment::adopt(hatch_->take(ranks_[rank_].nonce), bytes);
}

bool Meeting::all_have(const Way& way, const std::string& outcome) {
  const std::string phase = text("joined-", way.label);
  board_.post(key(phase, rank_), outcome);
  const std::vector<std::string> outcomes = read_all(phase, everybody());
  bool all = true;
  for (Rank r = 0; r < world_; ++r) {
    if (outcomes[r].front() == kFine) continue;
    all = false;
    failures_ += text("; ", way.label, ": rank ", r, ": ", outcomes[r].substr(1));
  }
  return all;
}

}  // namespace pycollect::shm
