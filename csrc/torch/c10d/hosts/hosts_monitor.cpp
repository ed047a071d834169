// See hosts_monitor.h.
#include "hosts_monitor.h"

#include <pthread.h>

#include <chrono>
#include <cstring>
#include <future>
#include <sstream>
#include <thread>

#include "../../../group/system.h"
#include "../../../plan/error.h"
#include "../torch_store.h"

namespace pycollect::dist {
namespace {

// Time limit of an access: a fourth of the time within which all ranks must notice a death.
constexpr std::chrono::milliseconds kLimit{500};
constexpr char kKey[] = "cause";

// Runs `access` in a thread, which is abandoned if it takes too long. Returns nothing then, after
// an error, and if the store is gone.
template <class T, class F>
std::optional<T> within_limit(const c10::intrusive_ptr<c10d::Store>& store, F access) {
  std::promise<std::optional<T>> promise;
  auto result = promise.get_future();
  try {
    ipc::new_thread([store, access = std::move(access), promise = std::move(promise)]() mutable {
      try {
        promise.set_value(answers(store, kLimit) ? access(*store) : std::nullopt);
      } catch (const std::exception&) {
        promise.set_value(std::nullopt);
      }
    }).detach();
  } catch (const std::exception&) {
    return std::nullopt;
  }
  if (result.wait_for(kLimit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace

void AbortStore::publish(const ipc::AbortCause& cause) const {
  within_limit<bool>(store_, [cause](c10d::Store& store) -> std::optional<bool> {
    if (store.check({kKey})) return false;
    const std::string text = pycollect::text(cause.kind, " ", cause.first_call, " ", cause.text);
    store.set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
    return true;
  });
}

std::optional<ipc::AbortCause> AbortStore::find() const {
  return within_limit<ipc::AbortCause>(store_, [](c10d::Store& store) {
    if (!store.check({kKey})) return std::optional<ipc::AbortCause>();
    const std::vector<uint8_t> value = store.get(kKey);
    std::istringstream text(std::string(value.begin(), value.end()));
    ipc::AbortCause cause;
    text >> cause.kind >> cause.first_call;
    std::getline(text.ignore(), cause.text, '\0');
    return std::optional(std::move(cause));
  });
}

namespace {

// A tenth of the time within which all ranks of all hosts must notice a death.
constexpr std::chrono::milliseconds kInterval{200};

// How long a rank waits until the host that watches it has its last message.
constexpr std::chrono::milliseconds kFarewellTime{500};

// The last message to the host that watches this one: the first call and the kind of an AbortCause,
// or `healthy` in a farewell, and the text of the cause.
constexpr std::size_t kCallBytes = sizeof(uint64_t), kHeaderBytes = kCallBytes + sizeof(uint32_t);
constexpr std::size_t kMostText = 1000;
using LastMessage = std::vector<std::byte>;

std::shared_ptr<LastMessage> encode(const ipc::AbortCause& cause) {
  const std::size_t n = std::min(cause.text.size(), kMostText);
  auto made = std::make_shared<LastMessage>(kHeaderBytes + n);
  std::memcpy(made->data(), &cause.first_call, sizeof cause.first_call);
  std::memcpy(made->data() + kCallBytes, &cause.kind, sizeof cause.kind);
  std::memcpy(made->data() + kHeaderBytes, cause.text.data(), n);
  return made;
}

// `message` is zeros behind the text.
ipc::AbortCause decode(const LastMessage& message) {
  ipc::AbortCause cause;
  std::memcpy(&cause.first_call, message.data(), sizeof cause.first_call);
  std::memcpy(&cause.kind, message.data() + kCallBytes, sizeof cause.kind);
  const auto* const text = reinterpret_cast<const char*>(message.data() + kHeaderBytes);
  cause.text.assign(text, strnlen(text, kMostText));
  return cause;
}

}  // namespace

HostsMonitor::HostsMonitor(std::shared_ptr<ipc::Group> group,
                           std::shared_ptr<ProcessGroupWire> wire,
                           std::shared_ptr<const AbortStore> abort_store, ipc::HostsLink link,
                           std::function<void()> tick)
    : group_(std::move(group)),
      wire_(std::move(wire)),
      abort_store_(std::move(abort_store)),
      link_(std::move(link)),
      tick_(std::move(tick)) {
  try {
    monitor_thread_ = ipc::new_thread([this] { serve(); });
    if (group_->rank() == 0) watching_thread_ = ipc::new_thread([this] { watch(); });
  } catch (...) {
    stop();
    throw;
  }
}

HostsMonitor::~HostsMonitor() { stop(); }

void HostsMonitor::stop() {
  if (!group_->is_healthy()) end();
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
  }
  changed_.notify_all();
  wire_->abort();
  for (std::thread* thread : {&monitor_thread_, &watching_thread_})
    if (thread->joinable()) thread->join();
}

Rank HostsMonitor::first_rank(int hosts_after) const {
  const Hosts& hosts = *link_.hosts;
  const int here = hosts.of(group_->world_rank(group_->rank()));
  return hosts.ranks((here + hosts_after) % hosts.count())[0];
}

void HostsMonitor::say_farewell() {
  if (group_->is_healthy()) tell({ipc::AbortRecord::healthy, ""});
}

// Sends the last message of this host, if it is the first one.
void HostsMonitor::tell(const ipc::AbortCause& cause) {
  if (group_->rank() != 0) return;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(told_, true)) return;
  }
  try {
    const ipc::Deadline soon = ipc::Clock::now() + kFarewellTime;
    const auto message = encode(cause);
    const Rank before = first_rank(link_.hosts->count() - 1);
    wire_->await(wire_->post_send(before, ProcessGroupWire::kFarewell, message->data(),
                                  message->size(), soon, message),
                 soon);
  } catch (const ipc::WireFailure&) {
    // That host has left or died, or all connections are closed.
  }
}

// Ends the group for other hosts, too, after it has been aborted.
void HostsMonitor::end() {
  const ipc::AbortCause cause = group_->abort_cause();
  tell(cause);
  abort_store_->publish(cause);
  wire_->abort();
}

void HostsMonitor::serve() {
  pthread_setname_np(pthread_self(), "pycollect hosts");
  std::unique_lock lock(mutex_);
  for (uint64_t n = 0; !changed_.wait_for(lock, kInterval / 2, [this] { return left_; }); ++n) {
    lock.unlock();
    wire_->look_for_signals();
    lock.lock();
    if (n % 2 == 0) continue;
    group_->abort_if_died();
    lock.unlock();
    if (!group_->is_healthy()) return end();
    tick_();
    lock.lock();
  }
}

void HostsMonitor::watch() {
  pthread_setname_np(pthread_self(), "pycollect watch");
  const Rank next = first_rank(1);
  const auto message = std::make_shared<LastMessage>(kHeaderBytes + kMostText);
  try {
    wire_->await(wire_->post_receive(next, ProcessGroupWire::kFarewell, message->data(),
                                     message->size(), ipc::Deadline::max(), message),
                 ipc::Deadline::max());
    const ipc::AbortCause cause = decode(*message);
    if (cause.kind == ipc::AbortRecord::healthy) return;
    group_->abort(cause);
  } catch (const ipc::WireFailure& failure) {
    const auto is_over = [this] {
      const std::lock_guard lock(mutex_);
      return left_ || !group_->is_healthy();
    };
    const ipc::AbortCause cause = link_.cause_of(next, failure, ipc::kCauseTime, is_over);
    if (is_over()) return;
    group_->abort(cause);
  }
  end();
}

}  // namespace pycollect::dist
