// See torch_store.h. Stores throw different errors on a timeout, so the clock detects timeouts.
#include "torch_store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "../../plan/error.h"
#include "interpreter.h"

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
// The pause between two polls of the store is this part of the time that has passed, and at most
// kMaxPause: each poll is a request of 0.1 ms.
constexpr int kWaitedPerPause = 8;
constexpr std::chrono::microseconds kMinPause{100}, kMaxPause{100'000};
// Limit of a single store wait, because stores count in other units, some of them in 32 bits.
constexpr std::chrono::milliseconds kMaxWait = std::chrono::hours(24);

// A client that connects before the server has closed its listening socket, too, or before rank 0
// has started the next server, tries again after a second only.
constexpr std::chrono::milliseconds kServerGrace{10};

Timeout late(const std::vector<std::string>& keys) {
  return Timeout(
      text("no rank has written ", keys.front(), " to the store before the timeout was over"));
}

}  // namespace

std::string first_line(std::string_view text) {
  if (text.starts_with("[")) text.remove_prefix(std::min(text.size(), text.find("] ") + 2));
  return std::string(text.substr(0, std::min(text.find(". This is"), text.find('\n'))));
}

bool is_store_failure(const std::exception& error) {
  if (dynamic_cast<const c10::DistError*>(&error) != nullptr) return true;
  const auto* const raised = dynamic_cast<const pybind11::error_already_set*>(&error);
  if (raised == nullptr) return false;
  const pybind11::gil_scoped_acquire gil;
  return raised->matches(pybind11::module_::import("torch.distributed").attr("DistError"));
}

std::string store_failed(const std::exception& e) {
  return text("the store failed, which may be in the process of rank 0: ", first_line(e.what()));
}

std::chrono::nanoseconds store_pause(std::chrono::nanoseconds waited) {
  return std::clamp<std::chrono::nanoseconds>(waited / kWaitedPerPause, kMinPause, kMaxPause);
}

TorchStore::~TorchStore() {
  if (rank_ != 0 || prefix_.empty()) return;
  try {
    store_->set(kOpen, std::string(kClosed));  // not deleted: a rank that waited may still read it
  } catch (const std::exception&) {
    // The store is gone, so there is no key to update.
  }
}

const std::string& TorchStore::prefix() {
  if (!prefix_.empty()) return prefix_;
  const std::string number =
      rank_ == 0 ? text(store_->add("pycollect/rendezvous", 1)) : join_rendezvous();
  if (rank_ == 0) store_->set(kOpen, number);
  return prefix_ = text("pycollect/", number, "/");
}

std::string TorchStore::join_rendezvous() {
  for (std::string last;; std::this_thread::sleep_for(kRetryInterval), check_signals()) {
    wait({kOpen}, deadline_);
    const std::string number = store_->get_to_str(kOpen);
    if (number != last && number != kClosed &&
        store_->add(text("pycollect/", number, "/joined by rank ", rank_), 1) == 1)
      return number;
    last = number;
    if (ipc::Clock::now() >= deadline_)
      throw Timeout("rank 0 has not started the rendezvous before the timeout was over");
  }
}

void TorchStore::post(const std::string& key, const std::string& value) {
  store_->set(prefix() + key, value);
}

// Polls the keys, and runs signal handlers meanwhile, or has the store wait. A store's own wait
// blocks handlers; a short one logs its timeout (TCPStore) or counts whole seconds (FileStore).
void TorchStore::wait(const std::vector<std::string>& keys, ipc::Deadline deadline) {
  using std::chrono::milliseconds;
  const auto begin = ipc::Clock::now();
  const bool polls = handles_signals() || deadline - begin < kShortWait;
  for (; polls; check_signals()) {
    try {
      if (store_->check(keys)) return;
    } catch (const std::exception&) {
      break;  // the store cannot be polled
    }
    const auto now = ipc::Clock::now();
    if (now >= deadline) throw late(keys);
    std::this_thread::sleep_for(store_pause(now - begin));
  }
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
      throw late(keys);
    }
  }
}

std::vector<std::string> TorchStore::read_all(const std::vector<std::string>& keys,
                                              ipc::Deadline deadline) {
  std::vector<std::string> wanted, values;
  for (const std::string& key : keys) wanted.push_back(prefix() + key);
  wait(wanted, deadline);
  if (store_->hasExtendedApi())
    for (const auto& value : store_->multiGet(wanted))
      values.emplace_back(value.begin(), value.end());
  else
    for (const std::string& key : wanted) values.push_back(store_->get_to_str(key));
  return values;
}

namespace {

// Returns whether `f` holds for the number of any file descriptor of this process.
template <class F>
bool any_descriptor(const F& f) {
  std::error_code failed;
  return std::ranges::any_of(
      std::filesystem::directory_iterator("/proc/self/fd", failed),
      [&f](const auto& entry) { return f(std::atoi(entry.path().filename().c_str())); });
}

using NameOf = int (*)(int, sockaddr*, socklen_t*);  // getsockname or getpeername

// Returns the port of one end of a TCP connection or listening socket; 0: it is none.
int port_of(int descriptor, NameOf name_of) {
  sockaddr_storage at = {};
  socklen_t length = sizeof at;
  if (name_of(descriptor, reinterpret_cast<sockaddr*>(&at), &length) != 0) return 0;
  if (at.ss_family != AF_INET && at.ss_family != AF_INET6) return 0;
  return ntohs(reinterpret_cast<const sockaddr_in&>(at).sin_port);  // in both at the same place
}

}  // namespace

StoreServer::StoreServer(const c10::intrusive_ptr<c10d::Store>& store) : store_(store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto inner = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  const auto* const client = dynamic_cast<const c10d::TCPStore*>(inner.get());
  if (client == nullptr) return;
  store_ = c10::weak_intrusive_ptr<c10d::Store>(inner);
  port_ = client->getPort();
}

bool StoreServer::ends_with_group() const {
  const auto runs_here = [this] {
    return any_descriptor([this](int descriptor) {
      int listens = 0;
      socklen_t length = sizeof listens;
      return getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 &&
             listens != 0 && port_of(descriptor, getsockname) == port_;
    });
  };
  return exists() && store_.use_count() == 1 && runs_here();
}

bool StoreServer::is_connected() const {
  return any_descriptor([this](int descriptor) {
    pollfd state = {.fd = descriptor, .events = POLLRDHUP, .revents = 0};
    return port_of(descriptor, getpeername) == port_ && poll(&state, 1, 0) == 0;
  });
}

void StoreServer::await_end(std::chrono::milliseconds at_most) const {
  const auto end = ipc::Clock::now() + at_most;
  for (; is_connected(); check_signals()) {
    if (ipc::Clock::now() >= end) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::this_thread::sleep_for(kServerGrace);
}

}  // namespace pycollect::dist
