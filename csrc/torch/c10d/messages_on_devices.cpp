// See messages.h: messages that devices have in hand. Those that have not come from there yet keep
// their turn; parcels are looked after until both ends are done with them.
#include <algorithm>

#include "../../plan/error.h"
#include "messages.h"

namespace pycollect::dist {

std::shared_ptr<Passage> Messages::passage_of(const Letter& letter, bool receives) {
  std::shared_ptr<Passage> parcel = receives
                                        ? parcels_->incoming(parcels_, letter.tensor)
                                        : parcels_->outgoing(parcels_, letter.tensor, *letter.peer);
  return parcel ? parcel : parcels_->staged();
}

void Messages::post(const c10::intrusive_ptr<MessageWork>& work) {
  work->post(mailbox_);
  if (work->parcel_ == nullptr) return;
  {
    const std::lock_guard lock(handed_mutex_);
    handed_over_.push_back(work);
    handed_ = static_cast<int>(handed_over_.size());
  }
  advance_parcels();  // its turn may have come already
  if (in_hand_) mailbox_.wake();
}

// By one thread at a time; another has something else to do, or looks again.
void Messages::advance_parcels() {
  if (handed_ == 0) return;
  std::vector<c10::intrusive_ptr<MessageWork>> over;  // let go of without the lock
  const std::unique_lock lock(handed_mutex_, std::try_to_lock);
  if (!lock) return;
  turns_ = mailbox_.turns();
  bool in_hand = false;
  std::erase_if(handed_over_, [&](c10::intrusive_ptr<MessageWork>& work) {
    in_hand |= work->advance(mailbox_);
    if (!work->is_moved()) return false;
    over.push_back(std::move(work));
    return true;
  });
  handed_ = static_cast<int>(handed_over_.size());
  in_hand_ = in_hand;
}

// Behind what goes to the same rank and has not left: messages do not overtake each other.
void Messages::dispatch(const c10::intrusive_ptr<MessageWork>& work) {
  if (!work->passage_ && !leaves_) return post(work);
  {
    const std::lock_guard lock(leaving_mutex_);
    leaving_.push_back(work);
    leaves_ = true;
  }
  dispatch_arrived();
  if (leaves_) mailbox_.wake();  // the thread, which only looks after what it knows of
}

// A stream that is held up holds up no message to another rank.
void Messages::dispatch_arrived() {
  if (!leaves_) return;
  const std::lock_guard lock(leaving_mutex_);
  uint64_t held_up = 0;  // a bit for each rank
  std::erase_if(leaving_, [&](const c10::intrusive_ptr<MessageWork>& work) {
    const uint64_t peer = uint64_t{1} << *work->ask_.peer;
    try {
      if ((held_up & peer) == 0 && (!work->passage_ || work->passage_->arrived())) {
        post(work);
        return true;
      }
    } catch (...) {
      work->fail(std::current_exception());
      return true;
    }
    held_up |= peer;
    return false;
  });
  leaves_ = !leaving_.empty();
}

void Messages::await_dispatch(const MessageWork& work, shm::Deadline deadline) {
  const auto left = [&] {
    if (work.transfer() || work.is_moved()) return true;
    dispatch_arrived();
    return work.transfer() || work.is_moved();
  };
  if (!left())
    group_->await(left, [&] { return std::vector<Rank>{group_->rank()}; }, work.occasion(deadline));
}

// While a device has something in hand, or until `stop`.
void Messages::glance(MessageWork& work, const std::function<bool()>& stop,
                      shm::Deadline deadline) {
  const auto over = [&] {
    progress();
    return stop() || !glances();
  };
  try {
    group_->await(
        over, [&] { return work.missing(mailbox_); }, work.occasion(deadline),
        [] { std::this_thread::sleep_for(kGlance); });
  } catch (const CollectiveError&) {
    mailbox_.fail(std::current_exception());
    throw;
  }
}

// As the mailbox does when it is waited in.
void Messages::fail_with_group() {
  try {
    group_->require_whole({"send or recv", 0, shm::Deadline::max()});
  } catch (const CollectiveError&) {
    mailbox_.fail(std::current_exception());
    drop_leaving(std::current_exception());
  }
}

std::vector<Rank> Messages::missing() {
  std::vector<Rank> ranks;
  const std::lock_guard lock(mutex_);
  for (const auto& work : open_) {
    if (work->is_moved()) continue;
    for (Rank r : work->missing(mailbox_))
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) ranks.push_back(r);
  }
  return ranks;
}

// Instead of the mailbox, which would sleep: while a device has something in hand, or until
// something is done. A stream that is held up hides no death of a rank that a message depends on.
void Messages::attend(const shm::Occasion& first) {
  const auto over = [&] {
    progress();
    const std::lock_guard hold(mutex_);
    return closed_ || !glances() || any_calls(first.deadline);
  };
  try {
    group_->await(
        over, [&] { return missing(); }, first, [] { std::this_thread::sleep_for(kGlance); });
  } catch (const CollectiveError&) {
    fail_with_group();
    std::this_thread::sleep_for(kGlance);  // the device may have it for long yet
  }
}

// Looks after all parcels while this one is not moved, and as long as there are any.
void Messages::await_parcels(MessageWork& work, shm::Deadline deadline) {
  const auto transfer = work.transfer();
  const auto moved = [&] { return work.is_moved() || handed_ == 0; };
  while (!moved()) {
    progress();
    if (glances())
      glance(work, moved, deadline);
    else
      mailbox_.wait(*transfer, [&] { return moved() || stirs(); }, work.occasion(deadline));
  }
}

void Messages::drop_leaving(const std::exception_ptr& error) {
  const std::lock_guard lock(leaving_mutex_);
  for (const auto& work : leaving_) work->fail(error);
  leaving_.clear();
  leaves_ = false;
}

}  // namespace pycollect::dist
