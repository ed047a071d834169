// See device_messages.h.
#include "device_messages.h"

#include <algorithm>

#include "../../plan/error.h"

namespace pycollect::dist {

DeviceMessages::DeviceMessages(ipc::Group& group, ipc::Mailbox& mailbox,
                               std::shared_ptr<DeviceOps> devices)
    : group_(group), mailbox_(mailbox), devices_(std::move(devices)) {}

std::shared_ptr<TensorStaging> DeviceMessages::staging() const {
  return stage_through_host(devices_);
}

void DeviceMessages::post_in_order(const MessageWorkPtr& work) {
  if (!work->staging_ && !any_unposted_) return work->post(mailbox_);
  {
    const std::lock_guard lock(unposted_mutex_);
    unposted_.push_back(work);
    any_unposted_ = true;
  }
  progress();
  if (any_unposted_) mailbox_.wake();  // waiting threads must now poll for this send
}

// Returns true if the message was posted or has failed. A device error aborts the group, because
// the peer may already wait for the message.
bool DeviceMessages::try_post(const MessageWorkPtr& work) {
  try {
    if (work->staging_ && !work->staging_->inputs_ready()) return false;
    work->post(mailbox_);
  } catch (const CollectiveError&) {
    work->fail(std::current_exception());
  } catch (const std::exception& error) {
    work->fail(std::current_exception());
    group_.abort(text("the device of a rank failed in send: ", error.what()));
  }
  return true;
}

void DeviceMessages::progress() {
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
  devices_->await_held(device_deadline(deadline));
}

}  // namespace pycollect::dist
