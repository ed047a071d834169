// See store_board.h. Stores disagree about what they throw when the time is over, so that is told
// by the clock.
#include "store_board.h"

#include <algorithm>
#include <thread>

#include "../../plan/error.h"

namespace pycollect::dist {
namespace {

// Under it there is the number of the meeting that is open, if one is.
constexpr char kOpen[] = "pycollect/open";
constexpr char kClosed[] = "closed";
// A meeting that this rank has been in is open only until rank 0 has left it, too.
constexpr std::chrono::milliseconds kPause{5};
// A meeting looks after its ranks twice a second: it waits for less than this.
constexpr std::chrono::milliseconds kShort{1000};
// Between two looks at the store, each a request of a tenth of a millisecond.
constexpr std::chrono::microseconds kLongestPause{10000};
// Stores count in other units, some in 32 bits.
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24);

std::string as_text(const std::vector<uint8_t>& value) { return {value.begin(), value.end()}; }
std::vector<uint8_t> as_bytes(const std::string& value) { return {value.begin(), value.end()}; }

}  // namespace

StoreBoard::~StoreBoard() {
  if (rank_ != 0 || prefix_.empty()) return;
  try {
    store_->set(kOpen, as_bytes(kClosed));  // not deleted: who has waited for it may read it yet
  } catch (const std::exception&) {
    // A store that is gone.
  }
}

const std::string& StoreBoard::prefix() {
  if (prefix_.empty()) prefix_ = text("pycollect/", rank_ == 0 ? opened() : found(), "/");
  return prefix_;
}

std::string StoreBoard::opened() {
  const std::string number = text(store_->add("pycollect/meetings", 1));
  store_->set(kOpen, as_bytes(number));
  return number;
}

std::string StoreBoard::found() {
  for (std::string been;; std::this_thread::sleep_for(kPause)) {
    wait({kOpen}, deadline_);
    const std::string number = as_text(store_->get(kOpen));
    if (number != been && number != kClosed &&
        store_->add(text("pycollect/", number, "/times that rank ", rank_, " came"), 1) == 1)
      return number;
    been = number;
    if (shm::Clock::now() >= deadline_) throw Timeout("rank 0 has opened no meeting in time");
  }
}

void StoreBoard::post(const std::string& key, const std::string& value) {
  store_->set(prefix() + key, as_bytes(value));
}

// Looks again and again. A store that waits for so short a time logs that it was in vain
// (TCPStore), or counts whole seconds (FileStore). False: this one cannot be looked at.
bool StoreBoard::poll(const std::vector<std::string>& keys, shm::Deadline deadline) {
  std::chrono::microseconds pause(100);
  try {
    while (!store_->check(keys)) {
      if (shm::Clock::now() >= deadline)
        throw Timeout(text("nobody has written ", keys.front(), " to the store in time"));
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
    return true;
  } catch (const Timeout&) {
    throw;
  } catch (const std::exception&) {
    return false;
  }
}

void StoreBoard::wait(const std::vector<std::string>& keys, shm::Deadline deadline) {
  using std::chrono::milliseconds;
  if (deadline - shm::Clock::now() < kShort && poll(keys, deadline)) return;
  for (;;) {
    const auto until = std::min(deadline, shm::deadline_after(kLongestWait));
    // No time at all means for ever to some stores.
    const auto left = std::max(std::chrono::duration_cast<milliseconds>(until - shm::Clock::now()),
                               milliseconds(1));
    try {
      return store_->wait(keys, left);
    } catch (const std::exception&) {
      // Some count whole milliseconds, and end before the last of them is over.
      const auto about = shm::Clock::now() + milliseconds(10);
      if (about < until) throw;
      if (about < deadline) continue;
      throw Timeout(text("nobody has written ", keys.front(), " to the store in time"));
    }
  }
}

std::string StoreBoard::read(const std::string& key, shm::Deadline deadline) {
  wait({prefix() + key}, deadline);
  return as_text(store_->get(prefix() + key));
}

std::vector<std::string> StoreBoard::read_all(const std::vector<std::string>& keys,
                                              shm::Deadline deadline) {
  if (keys.empty() || !store_->hasExtendedApi()) return Board::read_all(keys, deadline);
  std::vector<std::string> wanted;
  for (const std::string& key : keys) wanted.push_back(prefix() + key);
  wait(wanted, deadline);
  std::vector<std::string> values;
  for (const auto& value : store_->multiGet(wanted)) values.push_back(as_text(value));
  return values;
}

}  // namespace pycollect::dist
