#include "watch.h"

#include <pthread.h>

#include "../plan/error.h"
#include "../shm/new_thread.h"

namespace pycollect::slabs {
namespace {

// Most calls have ended by then, and cost the host nothing but this one look.
constexpr std::chrono::milliseconds kFirstLook{5};
// Between the next ones: a five-hundredth of the second in which a death must be noticed.
constexpr std::chrono::milliseconds kLooks{2};
// Beyond whatever a stream waits for, and still ahead of it as counters are compared.
constexpr uint64_t kBeyond = uint64_t{1} << 62;

}  // namespace

bool Errand::ended() {
  if (error()) return true;
  try {
    return about_.reached();
  } catch (...) {
    fail(std::current_exception());
    return true;
  }
}

std::exception_ptr Errand::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::exception_ptr Errand::tell() {
  const std::lock_guard lock(mutex_);
  told_ = told_ || error_;
  return error_;
}

void Errand::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

std::shared_ptr<void> Errand::take_lent() {
  std::shared_ptr<void> lent = std::move(lent_);
  if (lent && error()) keep_for_ever(std::move(lent));
  return lent;
}

void keep_for_ever(std::shared_ptr<void> lent) {
  static_cast<void>(new std::shared_ptr<void>(std::move(lent)));
}

Watch::Watch(std::shared_ptr<shm::Group> group, const Deck& deck)
    : group_(std::move(group)),
      deck_(deck),
      thread_(shm::new_thread_without_signals([this] { serve(); })) {}

Watch::~Watch() { end(); }

void Watch::end() {
  {
    const Lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Watch::free_returned() {
  std::vector<std::shared_ptr<void>> returned;  // let go of without the lock
  const Lock lock(mutex_);
  returned.swap(returned_);
}

void Watch::take(std::shared_ptr<Errand> errand) {
  {
    const Lock lock(mutex_);
    open_.push_back(std::move(errand));
    changed_.notify_all();
  }
  free_returned();  // now that it is known what may have to be let go for that
}

void Watch::serve() {
  pthread_setname_np(pthread_self(), "pycollect gpu");
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || !open_.empty(); });
    if (open_.empty()) return;
    const std::shared_ptr<Errand> errand = open_.front();
    lock.unlock();
    see_through(*errand);
    lock.lock();
    if (auto lent = errand->take_lent()) returned_.push_back(std::move(lent));
    if (errand->error()) failed_.push_back(errand);
    open_.pop_front();
    changed_.notify_all();
  }
}

// In the order in which the stream has them, so whoever comes next has often ended already.
void Watch::see_through(Errand& errand) {
  if (errand.ended() && !errand.error()) return;
  std::this_thread::sleep_for(kFirstLook);
  try {
    group_->await([&] { return errand.ended(); }, [&] { return missing(errand); },
                  errand.occasion(), [] { std::this_thread::sleep_for(kLooks); });
  } catch (...) {
    errand.fail(std::current_exception());
  }
  if (!errand.error()) return;
  // Of the device, perhaps, and then the others do not know it yet.
  group_->abort(text("its GPU failed in ", errand.about_.operation));
  let_go(errand);
}

// Who has died of those that it waits for; or else whose stream is behind all others', which may
// only wait for it, and of these those that it waits for itself, if there are any.
std::vector<Rank> Watch::missing(const Errand& errand) const {
  const std::vector<uint64_t>& awaited = errand.about_.awaited;
  const auto counter = [&](Rank r) {
    return deck_.counter(r).reached.load(std::memory_order_acquire);
  };
  const uint64_t dead = group_->dead(), gone = group_->gone();
  std::vector<Rank> lost;
  for (Rank r = 0; r < group_->world(); ++r)
    if ((dead >> r & 1) != 0 && !shm::reached(counter(r), awaited[r])) lost.push_back(r);
  if (!lost.empty()) return lost;
  // Whoever has done its part may go.
  const auto is_through = [&](Rank r) {
    return (gone >> r & 1) != 0 && shm::reached(counter(r), awaited[r]);
  };
  uint64_t least = counter(group_->rank());
  for (Rank r = 0; r < group_->world(); ++r)
    if (const uint64_t seen = counter(r); shm::reached(least, seen) && !is_through(r)) least = seen;
  std::vector<Rank> last, waited_for;
  for (Rank r = 0; r < group_->world(); ++r) {
    const uint64_t seen = counter(r);
    if (seen != least || is_through(r)) continue;
    last.push_back(r);
    if (!shm::reached(seen, awaited[r])) waited_for.push_back(r);
  }
  if (last.empty()) return {group_->rank()};
  return waited_for.empty() ? last : waited_for;
}

// A stream that lives writes its counter after that, and lower; so it is said again until the own
// stream is through. All that it then waits for is enqueued somewhere, so it ends. Results are
// not written any more before the first one is let go.
void Watch::let_go(Errand& errand) const {
  deck_.aborted().store(1, std::memory_order_seq_cst);
  const auto drained = [&] {
    try {
      return errand.about_.reached();
    } catch (...) {  // a device that has failed does nothing more
      return true;
    }
  };
  while (!drained()) {
    for (Rank r = 0; r < static_cast<Rank>(errand.about_.awaited.size()); ++r)
      if (r != group_->rank())
        deck_.counter(r).reached.store(errand.about_.awaited[r] + kBeyond,
                                       std::memory_order_seq_cst);
    std::this_thread::sleep_for(kLooks);
  }
}

std::exception_ptr Watch::close(std::chrono::milliseconds grace) {
  Lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  if (!changed_.wait_for(lock, grace, [&] { return open_.empty(); })) {
    lock.unlock();
    group_->abort("it was destroyed while collectives were under way on a GPU");
    lock.lock();
    changed_.wait(lock, [&] { return open_.empty(); });
  }
  lock.unlock();
  end();
  free_returned();
  for (const auto& errand : failed_)
    if (!errand->told_) return errand->error();
  return nullptr;
}

}  // namespace pycollect::slabs
