// See store_board.h. Stores disagree about what they throw when the time is over, so that is told
// by the clock.
#include "store_board.h"

#include <algorithm>

#include "../../plan/error.h"

namespace pycollect::dist {
namespace {

std::string as_text(const std::vector<uint8_t>& value) { return {value.begin(), value.end()}; }

}  // namespace

// How many groups of this name the rank has been in is the same on all ranks.
const std::string& StoreBoard::prefix() {
  if (prefix_.empty()) {
    const int64_t turn = store_->add(text("pycollect/turns of rank ", rank_), 1);
    prefix_ = text("pycollect/", turn, "/");
  }
  return prefix_;
}

void StoreBoard::post(const std::string& key, const std::string& value) {
  store_->set(prefix() + key, std::vector<uint8_t>(value.begin(), value.end()));
}

void StoreBoard::wait(const std::vector<std::string>& keys, shm::Deadline deadline) {
  using std::chrono::milliseconds;
  // No time at all means for ever to some stores.
  const auto left = std::max(std::chrono::duration_cast<milliseconds>(deadline - shm::Clock::now()),
                             milliseconds(1));
  try {
    store_->wait(keys, left);
  } catch (const std::exception&) {
    // Some count whole milliseconds, and end before the last of them is over.
    if (shm::Clock::now() + milliseconds(10) < deadline) throw;
    throw Timeout(text("nobody has written ", keys.front(), " to the store in time"));
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
