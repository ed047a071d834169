// See torch_store.h. Stores throw different errors on a timeout, so the clock detects timeouts.
#include "torch_store.h"

#include <algorithm>
#include <thread>

#include "../../plan/error.h"

namespace pycollect::dist {
namespace {

// Key that holds the number of the open rendezvous, or kClosed.
constexpr char kOpen[] = "pycollect/open";
constexpr char kClosed[] = "closed";
// Retry interval while the store still names a rendezvous that this rank has joined before, which
// stays open only until rank 0 leaves it.
constexpr std::chrono::milliseconds kRetryInterval{5};
// Waits shorter than this poll. A rendezvous checks its ranks twice a second, with shorter waits.
constexpr std::chrono::milliseconds kShortWait{1000};
// Longest pause between two polls of the store; each poll is a request of 0.1 ms.
constexpr std::chrono::microseconds kMaxPause{10000};
// Limit of a single store wait, because stores count in other units, some of them in 32 bits.
constexpr std::chrono::milliseconds kMaxWait = std::chrono::hours(24);

std::string as_text(const std::vector<uint8_t>& value) { return {value.begin(), value.end()}; }
std::vector<uint8_t> as_bytes(const std::string& value) { return {value.begin(), value.end()}; }

}  // namespace

TorchStore::~TorchStore() {
  if (rank_ != 0 || prefix_.empty()) return;
  try {
    store_->set(kOpen, as_bytes(kClosed));  // not deleted: a rank that waited may still read it
  } catch (const std::exception&) {
    // The store is gone, so there is no key to update.
  }
}

const std::string& TorchStore::prefix() {
  if (prefix_.empty())
    prefix_ = text("pycollect/", rank_ == 0 ? open_rendezvous() : join_rendezvous(), "/");
  return prefix_;
}

std::string TorchStore::open_rendezvous() {
  const std::string number = text(store_->add("pycollect/rendezvous", 1));
  store_->set(kOpen, as_bytes(number));
  return number;
}

std::string TorchStore::join_rendezvous() {
  for (std::string last;; std::this_thread::sleep_for(kRetryInterval)) {
    wait({kOpen}, deadline_);
    const std::string number = as_text(store_->get(kOpen));
    if (number != last && number != kClosed &&
        store_->add(text("pycollect/", number, "/joined by rank ", rank_), 1) == 1)
      return number;
    last = number;
    if (ipc::Clock::now() >= deadline_)
      throw Timeout("rank 0 has not started the rendezvous before the timeout was over");
  }
}

void TorchStore::post(const std::string& key, const std::string& value) {
  store_->set(prefix() + key, as_bytes(value));
}

// Polls the keys until the deadline. A store's own wait this short logs its timeout (TCPStore) or
// counts whole seconds (FileStore). Returns false if the store cannot be polled.
bool TorchStore::poll(const std::vector<std::string>& keys, ipc::Deadline deadline) {
  std::chrono::microseconds pause(100);
  try {
    while (!store_->check(keys)) {
      if (ipc::Clock::now() >= deadline)
        throw Timeout(text("no rank has written ", keys.front(),
                           " to the store before the timeout was over"));
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kMaxPause);
    }
    return true;
  } catch (const Timeout&) {
    throw;
  } catch (const std::exception&) {
    return false;
  }
}

void TorchStore::wait(const std::vector<std::string>& keys, ipc::Deadline deadline) {
  using std::chrono::milliseconds;
  if (deadline - ipc::Clock::now() < kShortWait && poll(keys, deadline)) return;
  for (;;) {
    const auto until = std::min(deadline, ipc::deadline_after(kMaxWait));
    // Some stores take a timeout of zero as no limit.
    const auto left = std::max(std::chrono::duration_cast<milliseconds>(until - ipc::Clock::now()),
                               milliseconds(1));
    try {
      return store_->wait(keys, left);
    } catch (const std::exception&) {
      // Some stores count whole milliseconds and give up before the last of them is over.
      const auto soon = ipc::Clock::now() + milliseconds(10);
      if (soon < until) throw;
      if (soon < deadline) continue;
      throw Timeout(
          text("no rank has written ", keys.front(), " to the store before the timeout was over"));
    }
  }
}

std::string TorchStore::read(const std::string& key, ipc::Deadline deadline) {
  wait({prefix() + key}, deadline);
  return as_text(store_->get(prefix() + key));
}

std::vector<std::string> TorchStore::read_all(const std::vector<std::string>& keys,
                                              ipc::Deadline deadline) {
  if (keys.empty() || !store_->hasExtendedApi()) return Store::read_all(keys, deadline);
  std::vector<std::string> wanted;
  for (const std::string& key : keys) wanted.push_back(prefix() + key);
  wait(wanted, deadline);
  std::vector<std::string> values;
  for (const auto& value : store_->multiGet(wanted)) values.push_back(as_text(value));
  return values;
}

}  // namespace pycollect::dist
