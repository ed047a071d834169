// See device_messages.h.
#include "device_messages.h"

#include <algorithm>

#include "../../plan/error.h"

namespace pycollect::dist {

DeviceMessages::DeviceMessages(ipc::Group& group, ipc::Mailbox& mailbox,
                               std::shared_ptr<DeviceOps> devices)
    : group_(group), mailbox_(mailbox), devices_(std::move(devices)) {}

void DeviceMessages::progress() {
  post_arrived();
  pass_on_fragments();
}

std::shared_ptr<TensorStaging> DeviceMessages::staging_of(const at::Tensor& tensor) const {
  if (MessageStaging::serves(tensor)) return std::make_shared<MessageStaging>(devices_);
  return stage_through_host(devices_);
}

void DeviceMessages::post(const MessageWorkPtr& work) {
  work->post(mailbox_);
  if (work->fragments_ == nullptr) return;
  {
    const std::lock_guard lock(staged_mutex_);
    staged_.push_back(work);
    any_staged_ = true;
    if (!work->info_.receives) any_device_send_ = true;
  }
  if (any_device_send_) mailbox_.wake();
}

// Runs in one thread at a time: another thread returns at once, and may poll again.
void DeviceMessages::pass_on_fragments() {
  if (!any_staged_) return;
  std::vector<MessageWorkPtr> finished;  // released without the lock
  const std::unique_lock lock(staged_mutex_, std::try_to_lock);
  if (!lock) return;
  bool any_send = false;
  std::erase_if(staged_, [&](MessageWorkPtr& work) {
    const bool more = work->advance(mailbox_);
    any_send |= more && !work->info_.receives;
    if (!more) finished.push_back(std::move(work));
    return !more;
  });
  any_staged_ = !staged_.empty();
  any_device_send_ = any_send;
}

void DeviceMessages::post_in_order(const MessageWorkPtr& work) {
  if (!work->staging_ && !any_unposted_) return post(work);
  {
    const std::lock_guard lock(unposted_mutex_);
    unposted_.push_back(work);
    any_unposted_ = true;
  }
  post_arrived();
  if (any_unposted_) mailbox_.wake();  // waiting threads must now poll for this send
}

// Returns true if the message was posted or has failed. A device error aborts the group, because
// the peer may already wait for the message.
bool DeviceMessages::try_post(const MessageWorkPtr& work) {
  try {
    if (work->staging_ && !work->staging_->inputs_ready()) return false;
    post(work);
  } catch (const CollectiveError&) {
    work->fail(std::current_exception());
  } catch (const std::exception& error) {
    work->fail(std::current_exception());
    group_.abort(text("the device of a rank failed in send: ", error.what()));
  }
  return true;
}

// Posts the sends whose data has arrived. A send that has to wait for its stream delays only later
// sends to the same rank.
void DeviceMessages::post_arrived() {
  if (!any_unposted_) return;
  std::vector<MessageWorkPtr> finished;  // released without the lock
  const std::lock_guard lock(unposted_mutex_);
  std::vector<Rank> held_up;
  std::erase_if(unposted_, [&](MessageWorkPtr& work) {
    const Rank peer = *work->info_.peer;
    if (std::ranges::count(held_up, peer) != 0 || !try_post(work)) {
      held_up.push_back(peer);
      return false;
    }
    finished.push_back(std::move(work));
    return true;
  });
  any_unposted_ = !unposted_.empty();
}

void DeviceMessages::drop_unposted(const std::exception_ptr& error) {
  std::deque<MessageWorkPtr> finished;  // released without the lock
  const std::lock_guard lock(unposted_mutex_);
  for (const auto& work : unposted_) work->fail(error);
  finished.swap(unposted_);
  any_unposted_ = false;
}

void DeviceMessages::close(ipc::Deadline deadline) {
  std::vector<MessageWorkPtr> staged;  // released without the lock
  {
    const std::lock_guard lock(staged_mutex_);
    staged.swap(staged_);
    any_staged_ = any_device_send_ = false;
  }
  devices_->await_held(device_deadline(deadline));
}

}  // namespace pycollect::dist
