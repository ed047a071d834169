// The part of RankScheduler that ends a launch before its ranks have ended.
#include "../plan/error.h"
#include "member.h"

namespace pycollect::rank_threads {

std::exception_ptr end_error(EndKind kind, const std::string& why) {
  switch (kind) {
    case EndKind::deadlock:
      return std::make_exception_ptr(Deadlock(why));
    case EndKind::timed_out:
      return std::make_exception_ptr(Timeout(why));
    case EndKind::peer_lost:
      break;
  }
  return std::make_exception_ptr(PeerLost(why));
}

void RankScheduler::abort(EndKind kind, const std::string& cause) {
  Lock lock(mutex_);
  abort(kind, cause, lock);
}

void RankScheduler::abort(EndKind kind, const std::string& cause, Lock& lock) {
  if (aborted_) return;
  aborted_ = true;
  end_ = {kind, cause};
  dispatch();
  const auto listeners = std::exchange(listeners_, {});
  unlocked(lock, [&] {
    for (const auto& listener : listeners)
      if (const auto held = listener.lock()) held->abort(kind, cause);
  });
}

void RankScheduler::add_listener(const std::shared_ptr<LaunchListener>& listener) {
  {
    const Lock lock(mutex_);
    std::erase_if(listeners_, [](const auto& l) { return l.expired(); });
    if (!aborted_) return listeners_.push_back(listener);
  }
  listener->abort(end_.kind, end_.cause);
}

bool RankScheduler::is_aborted() {
  const Lock lock(mutex_);
  return aborted_;
}

void RankScheduler::throw_cause(const std::string& operation) const {
  const std::string why = text(operation, ": ", end_.cause);
  std::rethrow_exception(end_error(end_.kind, why));
}

}  // namespace pycollect::rank_threads
