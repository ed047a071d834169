// See messages.h: messages of tensors on devices. Those that have not come from there yet keep
// their turn; of those in pieces the first has come when they are posted, and the others follow.
#include <algorithm>

#include "../../plan/error.h"
#include "messages.h"

namespace pycollect::dist {

std::shared_ptr<Passage> Messages::passage_of(const at::Tensor& tensor) const {
  if (MessageStaging::serves(tensor)) return std::make_shared<MessageStaging>(devices_);
  return stage_through_host(devices_);
}

void Messages::post(const c10::intrusive_ptr<MessageWork>& work) {
  work->post(mailbox_);
  if (work->staging_ == nullptr) return;
  {
    const std::lock_guard lock(staged_mutex_);
    staged_.push_back(work);
    any_staged_ = true;
    if (!work->ask_.receives) coming_ = true;
  }
  if (coming_) mailbox_.wake();
}

// By one thread at a time; another has something else to do, or looks again.
void Messages::advance_staged() {
  if (!any_staged_) return;
  std::vector<c10::intrusive_ptr<MessageWork>> over;  // let go of without the lock
  const std::unique_lock lock(staged_mutex_, std::try_to_lock);
  if (!lock) return;
  bool coming = false;
  std::erase_if(staged_, [&](c10::intrusive_ptr<MessageWork>& work) {
    const bool more = work->advance(mailbox_);
    coming |= more && !work->ask_.receives;
    if (!more) over.push_back(std::move(work));
    return !more;
  });
  any_staged_ = !staged_.empty();
  coming_ = coming;
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

// Has it left, or never will? Its peer may have come for it already.
bool Messages::leave(const c10::intrusive_ptr<MessageWork>& work) {
  try {
    if (work->passage_ && !work->passage_->arrived()) return false;
    post(work);
  } catch (const CollectiveError&) {
    work->fail(std::current_exception());
  } catch (const std::exception& error) {
    work->fail(std::current_exception());
    abort(text("the device of a rank failed in send: ", error.what()));
  }
  return true;
}

// A stream that is held up holds up no message to another rank.
void Messages::dispatch_arrived() {
  if (!leaves_) return;
  std::vector<c10::intrusive_ptr<MessageWork>> over;  // let go of without the lock
  const std::lock_guard lock(leaving_mutex_);
  uint64_t held_up = 0;  // a bit for each rank
  std::erase_if(leaving_, [&](c10::intrusive_ptr<MessageWork>& work) {
    const uint64_t peer = uint64_t{1} << *work->ask_.peer;
    if ((held_up & peer) != 0 || !leave(work)) {
      held_up |= peer;
      return false;
    }
    over.push_back(std::move(work));
    return true;
  });
  leaves_ = !leaving_.empty();
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

// A device that holds a message up does not hide that its receiver has gone.
std::vector<Rank> Messages::missing(const MessageWork& work, uint64_t gone) const {
  const Rank peer = work.transfer() ? work.peer() : group_->rank();
  return peer >= 0 && (gone >> peer & 1) != 0 ? std::vector<Rank>{peer} : work.missing(mailbox_);
}

std::vector<Rank> Messages::missing() {
  std::vector<Rank> ranks;
  const uint64_t gone = group_->gone();
  const std::lock_guard lock(mutex_);
  for (const auto& work : open_) {
    if (work->is_moved()) continue;
    for (Rank r : missing(*work, gone))
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) ranks.push_back(r);
  }
  return ranks;
}

void Messages::drop_leaving(const std::exception_ptr& error) {
  std::deque<c10::intrusive_ptr<MessageWork>> over;  // let go of without the lock
  const std::lock_guard lock(leaving_mutex_);
  for (const auto& work : leaving_) work->fail(error);
  over.swap(leaving_);
  leaves_ = false;
}

}  // namespace pycollect::dist
