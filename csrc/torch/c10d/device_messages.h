// Messages of device tensors, on their way between the devices of this rank and the mailbox. A send
// is posted once its data is in host memory, in order with other sends to the same peer; a large
// one is posted with its first fragment, and the others follow. Device copies ring no doorbell, so
// waiting threads poll while any copy is pending.
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

  std::shared_ptr<TensorStaging> staging_of(const at::Tensor& tensor) const;
  // Posts a receive.
  void post(const MessageWorkPtr& work);
  // Posts a send, of a host tensor too, after unposted ones: a message must not overtake an earlier
  // one to the same rank.
  void post_in_order(const MessageWorkPtr& work);
  // Posts the sends whose data has arrived, and passes on fragments.
  void progress();
  // Returns whether a device copy is pending that `progress` must find complete.
  bool polls() const { return any_unposted_ || any_device_send_; }
  // Fails the sends that are not posted.
  void drop_unposted(const std::exception_ptr& error);
  // Releases all messages, and the memory that devices use until the deadline at most.
  void close(ipc::Deadline deadline);

 private:
  void post_arrived();
  bool try_post(const MessageWorkPtr& work);
  void pass_on_fragments();

  ipc::Group& group_;
  ipc::Mailbox& mailbox_;
  const std::shared_ptr<DeviceOps> devices_;

  std::mutex unposted_mutex_;            // held while posting to the mailbox
  std::deque<MessageWorkPtr> unposted_;  // sends
  std::atomic<bool> any_unposted_{false};

  // Under staged_mutex_, only a work's own mutex and the mailbox's are locked.
  std::mutex staged_mutex_;
  std::vector<MessageWorkPtr> staged_;  // posted, but not all fragments passed on
  std::atomic<bool> any_staged_{false};
  std::atomic<bool> any_device_send_{false};  // whether any of staged_ is a send
};

}  // namespace pycollect::dist
