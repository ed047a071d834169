#include "meeting.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <system_error>

#include "../plan/error.h"
#include "ranks.h"

namespace pycollect::shm {
namespace {

// How long to ask a board for what may not be there, once the time is over: for each rank.
constexpr std::chrono::milliseconds kGlance{20};
// How long to wait for an answer before looking who is alive: half the second in which a death must
// be noticed.
constexpr std::chrono::milliseconds kGlances{500};

std::string key(Rank rank) { return text("hello/", rank); }

}  // namespace

Meeting::Meeting(Board& board, Rank rank, int world, const Settings& settings, const Signs& signs)
    : board_(board),
      rank_(rank),
      world_(world),
      settings_(settings),
      deadline_(deadline_after(settings.timeout)),
      signs_(signs) {}

std::vector<Introduction> Meeting::share(std::size_t bytes, const Preparation& preparation) {
  Introduction mine = introduce(settings_, world_);
  network_space_ = mine.network_space;
  try {
    if (auto segment = take(mine, bytes)) preparation(std::move(segment), mine.nonce);
  } catch (const PeerLost&) {
    throw;
  } catch (const Timeout&) {
    throw;
  } catch (const std::exception& error) {  // all shall hear of it
    mine.failure = error.what();
  }
  try {
    board_.post(key(rank_), mine.encode());
  } catch (const Timeout&) {  // others write where rank 0 says
    time_out({0});
  }
  std::vector<Introduction> ranks;
  for (const std::string& said : read_all()) ranks.push_back(Introduction::decode(said));
  require_one_host(ranks, settings_.name);
  require_same_terms(ranks, settings_.name);
  require_shared(ranks, settings_.name);
  return ranks;
}

// Nothing where another rank's introduction says why there is nothing to take.
std::shared_ptr<Segment> Meeting::take(Introduction& mine, std::size_t bytes) {
  if (settings_.segment) return settings_.segment;
  if (rank_ == 0) {
    auto segment = Segment::create(bytes);
    if (world_ == 1) return segment;
    Descriptor file(fcntl(segment->descriptor(), F_DUPFD_CLOEXEC, 0));
    if (!file) refuse("cannot offer the shared memory", errno);
    mine.ticket = outlet_.emplace().offer(std::move(file));
    return segment;
  }
  std::string said;
  try {
    said = board_.read(key(0), deadline_);
  } catch (const Timeout&) {
    time_out({0});
  }
  const Introduction owner = Introduction::decode(said);
  if (owner.boot != mine.boot || owner.terms != mine.terms || !owner.failure.empty())
    return nullptr;
  return Segment::adopt(fetch_from(owner), bytes);
}

Descriptor Meeting::fetch_from(const Introduction& owner) const {
  try {
    return fetch(owner.ticket, deadline_);
  } catch (const std::system_error& error) {
    const int why = error.code().value();
    if (why == EAGAIN || Clock::now() >= deadline_) time_out({0});
    if (why == ECONNREFUSED && network_space_ != 0 && owner.network_space == network_space_)
      fail(Breakage::lost,
           text("rank 0 (pid ", owner.pid, ") died before all had come, or waits no longer"));
    throw;
  }
}

std::vector<std::string> Meeting::read_all() {
  std::vector<std::string> keys;
  for (Rank r = 0; r < world_; ++r) keys.push_back(key(r));
  for (bool vain = false;;) {
    try {
      return board_.read_all(keys, std::min(deadline_, Clock::now() + (vain ? kGlance : kGlances)));
    } catch (const Timeout&) {  // which some boards throw a second late
      if (Clock::now() >= deadline_) break;
    }
    // Whoever has gone may have met all the others first: then all is there at the second look.
    if (vain) say_why_vain();
    vain = is_vain();
  }
  std::vector<Rank> missing;
  for (Rank r = 0; r < world_; ++r) {
    try {
      board_.read(keys[r], Clock::now() + kGlance);
    } catch (const Timeout&) {
      missing.push_back(r);
    }
  }
  time_out(missing);
}

void Meeting::time_out(const std::vector<Rank>& missing) const {
  const std::chrono::duration<double> waited = settings_.timeout;
  fail(Breakage::timed_out, text("timed out after ", waited.count(), " s; ",
                                 missing.empty() ? "the last rank was too late"
                                                 : text(name(missing), " did not arrive")));
}

// Is there no more reason to wait?
bool Meeting::is_vain() const {
  return signs_.broken && (signs_.broken->yes() || (signs_.peers && signs_.peers->dead() != 0));
}

void Meeting::say_why_vain() const {
  if (signs_.broken->yes()) signs_.broken->rethrow();
  const Rank r = std::countr_zero(signs_.peers->dead());
  fail(Breakage::lost,
       text("rank ", r, " (pid ", signs_.peers->pid(r), ") died before all had come"));
}

// With the words of whoever was the first to find that it is vain.
void Meeting::fail(uint32_t kind, const std::string& cause) const {
  if (signs_.broken) {
    signs_.broken->say(kind, cause, nullptr);
    signs_.broken->rethrow();
  }
  const std::string why = text("group '", settings_.name, "': ", cause);
  if (kind == Breakage::timed_out) throw Timeout(why);
  throw PeerLost(why);
}

}  // namespace pycollect::shm
