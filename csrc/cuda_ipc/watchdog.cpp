#include "watchdog.h"

#include <pthread.h>

#include "../group/new_thread.h"
#include "../plan/error.h"

namespace pycollect::cuda_ipc {
namespace {

// Delay before the first regular poll: most calls have ended by then and cost only that one poll.
constexpr std::chrono::milliseconds kFirstPollDelay{5};
// Interval of later polls: a five-hundredth of the second within which a death must be noticed.
constexpr std::chrono::milliseconds kPollInterval{2};
// Interval of queries for a device's error, after which work never ends: it is noticed within a
// second, too, and a query, which takes a lock that other threads' calls need, is rare.
constexpr std::chrono::milliseconds kDeviceCheckInterval{500};
// Time for this rank's stream to end after the group is aborted, which releases its waits.
constexpr std::chrono::seconds kReleaseTimeout{5};
// Added to an awaited signal to release the stream: the sum is beyond every value that a stream
// waits for, and still ahead of it in the wrap-around comparison of counters.
constexpr uint64_t kReleaseOffset = uint64_t{1} << 62;

}  // namespace

bool PendingWork::ended() {
  if (error()) return true;
  try {
    return info_.reached();
  } catch (...) {
    fail(std::current_exception());
    return true;
  }
}

std::exception_ptr PendingWork::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::exception_ptr PendingWork::report() {
  const std::lock_guard lock(mutex_);
  reported_ = reported_ || error_;
  return error_;
}

bool PendingWork::is_reported() const {
  const std::lock_guard lock(mutex_);
  return reported_;
}

void PendingWork::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

void PendingWork::add_wait(Rank r, uint64_t value) {
  const std::lock_guard lock(mutex_);
  awaited_[r] = value;
}

void PendingWork::set_end(std::function<bool()> query, std::shared_ptr<void> exposed) {
  const std::lock_guard lock(mutex_);
  query_ = std::move(query);
  exposed_ = std::move(exposed);
}

void PendingWork::lose(std::exception_ptr error, bool reported) {
  fail(std::move(error));
  const std::lock_guard lock(mutex_);
  lost_ = true;
  reported_ = reported_ || reported;
}

bool PendingWork::is_through() const {
  try {
    if (info_.reached()) return true;
  } catch (...) {  // ended without results
    return true;
  }
  const std::lock_guard lock(mutex_);
  return lost_;
}

void PendingWork::check_device() {
  std::unique_lock lock(mutex_);
  const std::function<bool()> query = query_;
  lock.unlock();
  try {
    if (query) query();
  } catch (...) {
    lose(std::current_exception(), false);
  }
}

std::vector<uint64_t> PendingWork::awaited() const {
  const std::lock_guard lock(mutex_);
  return awaited_;
}

std::shared_ptr<void> PendingWork::take_exposed() {
  const std::lock_guard lock(mutex_);
  if (exposed_ && error_) leak(std::move(exposed_));
  return std::move(exposed_);
}

void leak(std::shared_ptr<void> exposed) {
  static_cast<void>(new std::shared_ptr<void>(std::move(exposed)));
}

Watchdog::Watchdog(std::shared_ptr<ipc::Group> group, const SignalPad& signal_pad)
    : group_(std::move(group)),
      signal_pad_(signal_pad),
      thread_(ipc::new_thread_without_signals([this] { serve(); })) {
  try {
    checker_ = ipc::new_thread_without_signals([this] { serve_checks(); });
  } catch (...) {
    end();
    throw;
  }
}

Watchdog::~Watchdog() { end(); }

void Watchdog::end() {
  {
    const Lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  check_requested_.notify_all();
  if (checker_.joinable()) checker_.join();
}

void Watchdog::free_returned() {
  std::vector<std::shared_ptr<void>> returned;  // released after unlocking
  const Lock lock(mutex_);
  returned.swap(returned_);
}

void Watchdog::add(std::shared_ptr<PendingWork> work) {
  const Lock lock(mutex_);
  open_.push_back(std::move(work));
  changed_.notify_all();
}

void Watchdog::serve() {
  pthread_setname_np(pthread_self(), "pycollect gpu");
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || !open_.empty(); });
    if (open_.empty()) return;
    std::shared_ptr<PendingWork> work = open_.front();
    lock.unlock();
    poll_until_done(work);
    lock.lock();
    if (auto exposed = work->take_exposed()) returned_.push_back(std::move(exposed));
    if (work->error()) failed_.push_back(work);
    open_.pop_front();
    returned_.push_back(std::move(work));  // it may be the last owner of an event
    changed_.notify_all();
  }
}

// Polls one call's work until complete. Work is handled in stream order, so the next call's work
// has often ended already.
void Watchdog::poll_until_done(const std::shared_ptr<PendingWork>& pending) {
  PendingWork& work = *pending;
  if (work.ended() && !work.error()) return;
  std::this_thread::sleep_for(kFirstPollDelay);
  ipc::Deadline next_check = ipc::Clock::now() + kDeviceCheckInterval;
  try {
    group_->await([&] { return work.ended(); },
                  {.missing = [&] { return missing(work); },
                   .back_off =
                       [&] {
                         std::this_thread::sleep_for(kPollInterval);
                         request_check(pending, next_check);
                       }},
                  work.context());
  } catch (...) {
    work.fail(std::current_exception());
  }
  if (!work.error()) return;
  // The error may come from this rank's device, and then the peers have not seen it yet.
  group_->abort(text("its GPU failed in ", work.info_.operation));
  release(pending);
}

// What the last work waits for, which includes what all earlier work waits for.
std::vector<uint64_t> Watchdog::last_awaited() {
  const Lock lock(mutex_);
  return open_.back()->awaited();
}

// Makes the other thread query the device for an error, from time to time: the query may block.
void Watchdog::request_check(const std::shared_ptr<PendingWork>& work, ipc::Deadline& next) {
  const auto now = ipc::Clock::now();
  if (now < next) return;
  next = now + kDeviceCheckInterval;
  const Lock lock(mutex_);
  to_check_ = work;
  check_requested_.notify_one();
}

void Watchdog::serve_checks() {
  pthread_setname_np(pthread_self(), "pycollect check");
  Lock lock(mutex_);
  for (;;) {
    check_requested_.wait(lock, [&] { return to_check_ || (closed_ && open_.empty()); });
    if (!to_check_) return;
    std::shared_ptr<PendingWork> work = std::move(to_check_);
    lock.unlock();
    work->check_device();
    work.reset();
    lock.lock();
  }
}

// Ranks that hold up the work: the dead ones that it waits for. Otherwise the ranks whose streams
// are furthest behind, because the others may only be waiting for them; of these only the ones that
// the work itself waits for, if there are any.
std::vector<Rank> Watchdog::missing(const PendingWork& work) const {
  const std::vector<uint64_t> awaited = work.awaited();
  const auto counter = [&](Rank r) {
    return signal_pad_.counter(r).reached.load(std::memory_order_acquire);
  };
  const uint64_t dead = group_->dead(), gone = group_->gone();
  std::vector<Rank> lost;
  for (Rank r = 0; r < group_->world(); ++r)
    if ((dead >> r & 1) != 0 && !ipc::reached(counter(r), awaited[r])) lost.push_back(r);
  if (!lost.empty()) return lost;
  // A rank that has done its part may leave.
  const auto is_through = [&](Rank r) {
    return (gone >> r & 1) != 0 && ipc::reached(counter(r), awaited[r]);
  };
  uint64_t least = counter(group_->rank());
  for (Rank r = 0; r < group_->world(); ++r)
    if (const uint64_t seen = counter(r); ipc::reached(least, seen) && !is_through(r)) least = seen;
  std::vector<Rank> last, waited_for;
  for (Rank r = 0; r < group_->world(); ++r) {
    const uint64_t seen = counter(r);
    if (seen != least || is_through(r)) continue;
    last.push_back(r);
    if (!ipc::reached(seen, awaited[r])) waited_for.push_back(r);
  }
  if (last.empty()) return {group_->rank()};
  return waited_for.empty() ? last : waited_for;
}

// Releases this rank's stream by advancing the peers' counters. A live stream may overwrite its
// counter with a lower value, so the store is repeated until this rank's stream has ended. All that
// it still waits for is enqueued somewhere, so it does end. The host may be blocked in enqueueing
// later work, so that work's waits are released, too. `aborted` is set before, so that no results
// are written after the first stream is released.
void Watchdog::release(const std::shared_ptr<PendingWork>& work) {
  signal_pad_.aborted().store(1, std::memory_order_seq_cst);
  ipc::Deadline next_check = ipc::Clock::now() + kDeviceCheckInterval;
  for (;;) {
    const std::vector<uint64_t> awaited = last_awaited();
    for (Rank r = 0; r < group_->world(); ++r)
      if (r != group_->rank())
        signal_pad_.counter(r).reached.store(awaited[r] + kReleaseOffset,
                                             std::memory_order_seq_cst);
    if (work->is_through()) return;
    std::this_thread::sleep_for(kPollInterval);
    request_check(work, next_check);
  }
}

std::exception_ptr Watchdog::close(ipc::Deadline deadline) {
  Lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  const auto is_done = [&] { return open_.empty(); };
  if (!changed_.wait_until(lock, deadline, is_done)) {
    lock.unlock();
    group_->abort("it was destroyed while collectives were under way on a GPU");
    lock.lock();
    changed_.wait_for(lock, kReleaseTimeout, is_done);
  }
  std::vector<std::shared_ptr<PendingWork>> all = failed_;
  all.insert(all.end(), open_.begin(), open_.end());
  lock.unlock();
  if (!is_stuck()) {
    end();
    free_returned();
  }
  for (const auto& work : all)
    if (const auto error = work->error(); error && !work->is_reported()) return error;
  return nullptr;
}

bool Watchdog::is_stuck() const {
  const Lock lock(mutex_);
  return !open_.empty();
}

}  // namespace pycollect::cuda_ipc
