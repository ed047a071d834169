// Messages of device tensors, on their way from the devices of this rank to the mailbox. A send is
// posted once its data is in host memory, in order with other sends to the same peer. Device copies
// ring no doorbell, so waiting threads poll while any copy is pending.
#pragma once
#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "message_work.h"

namespace pycollect::dist {

// Thread-safe.
class DeviceMessages {
 public:
  using MessageWorkPtr = c10::intrusive_ptr<MessageWork>;

  // `devices`: with streams of their own, as messages must not wait for work of the collectives.
  DeviceMessages(ipc::Group& group, ipc::Mailbox& mailbox, std::shared_ptr<DeviceOps> devices);

  DeviceOps& devices() const { return *devices_; }
  std::shared_ptr<TensorStaging> staging() const;
  // Posts a send, of a host tensor too, after unposted ones: a message must not overtake an earlier
  // one to the same rank.
  void post_in_order(const MessageWorkPtr& work);
  // Posts the sends whose data has arrived. A send that has to wait for its stream delays only
  // later sends to the same rank.
  void progress();
  // Returns whether a device copy is pending that `progress` must find complete.
  bool polls() const { return any_unposted_; }
  // Fails the sends that are not posted.
  void drop_unposted(const std::exception_ptr& error);
  // Releases the memory that devices use, until the deadline at most.
  void close(ipc::Deadline deadline);

 private:
  bool try_post(const MessageWorkPtr& work);

  ipc::Group& group_;
  ipc::Mailbox& mailbox_;
  const std::shared_ptr<DeviceOps> devices_;

  std::mutex unposted_mutex_;            // held while posting to the mailbox
  std::deque<MessageWorkPtr> unposted_;  // sends
  std::atomic<bool> any_unposted_{false};
};

}  // namespace pycollect::dist
