#include "broken.h"

#include <algorithm>
#include <cstring>

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

// How long who finds the group broken waits for the words: they are written at once, but their
// writer can be killed.
constexpr std::chrono::milliseconds kSaying{100};

template <std::size_t n>
void write(std::array<char, n>& to, const std::string& from) {
  std::memcpy(to.data(), from.data(), std::min(from.size(), n - 1));  // the rest is zeros
}

}  // namespace

std::string Broken::name(const Occasion& occasion) const {
  return text(occasion.operation, " #", occasion.call, " of group '", group_, "'");
}

void Broken::say(uint32_t kind, const std::string& cause, const Occasion* found_in) {
  uint32_t whole = Breakage::whole;
  if (!breakage_.state.compare_exchange_strong(whole, Breakage::being_said)) return;
  if (found_in != nullptr) {
    breakage_.call = found_in->call;
    write(breakage_.operation, found_in->operation);
  }
  write(breakage_.cause, cause);
  breakage_.state.store(kind, std::memory_order_release);
}

void Broken::rethrow(const Occasion& occasion) const {
  const uint32_t kind = hear();
  const std::string found_in = sentence(breakage_.operation);
  const bool here = found_in == occasion.operation && breakage_.call == occasion.call;
  const bool told = here || found_in.empty();
  fail(kind, name(occasion),
       told ? "" : text("broken since ", found_in, " #", breakage_.call, ": "));
}

void Broken::rethrow() const { fail(hear(), text("group '", group_, "'"), ""); }

// Its kind, when the words are there; `being_said`: they never come.
uint32_t Broken::hear() const {
  const Deadline end = Clock::now() + kSaying;
  uint32_t state = Breakage::being_said;
  while ((state = breakage_.state.load(std::memory_order_acquire)) == Breakage::being_said &&
         Clock::now() < end)
    sched_yield();
  return state;
}

void Broken::fail(uint32_t kind, const std::string& where, const std::string& since) const {
  if (kind == Breakage::being_said)
    throw PeerLost(text(where, ": a rank died while it told why the group is broken"));
  const std::string why = text(where, ": ", since, sentence(breakage_.cause));
  if (kind == Breakage::timed_out) throw Timeout(why);
  throw PeerLost(why);
}

}  // namespace pycollect::shm
