// send and recv between processes. Every message makes progress by itself, independently of
// collectives. A waiting thread moves all messages; if none waits, a service thread does, which
// starts before the first message.
//
// A send of a device tensor is ready once its data is in host memory. Device copies ring no
// doorbell, so waiting threads poll while any copy is pending.
#pragma once
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "../../group/system.h"
#include "../../send_recv/mailbox.h"
#include "work.h"

namespace pycollect::dist {

class Messages final : public WorkOwner, public std::enable_shared_from_this<Messages> {
 public:
  // `remote`: the ranks on other hosts, if there are any. Messages name peers by their ranks.
  // `devices`: messages have streams of their own, as they must not wait for collectives.
  Messages(std::shared_ptr<ipc::Group> group, const DeviceOps& devices,
           std::shared_ptr<ipc::RemotePeers> remote = nullptr);

  WorkPtr post(const P2POp& op);
  void wait(GroupWork& work) override;
  bool wait_until(GroupWork& work, ipc::Deadline deadline) override;
  void progress(GroupWork& work) override;
  std::string describe(GroupWork& work) override;
  void abort(const std::string& why) override { group_->abort(why); }
  std::mutex& mutex() override { return mutex_; }
  // Refuses new messages and lets pending ones finish until the deadline, or until a signal handler
  // raises. If any are left then, aborts the group, which fails them. Returns what it has raised.
  std::exception_ptr close(ipc::Deadline deadline);

 private:
  using Lock = std::unique_lock<std::mutex>;
  ipc::TransferPtr new_transfer(MessageWork& work) const;
  // Moves all messages until `until` holds. Throws what Mailbox::wait throws.
  void await(const ipc::Mailbox::WaitCondition& until, const ipc::OpContext& context);
  static ipc::OpContext context(const MessageWork& work, ipc::Deadline deadline);
  // Completes a message that has moved or failed, unless another thread does. Unlocks meanwhile.
  void learn_source(MessageWork& work) const;
  void complete_work(Lock& lock, MessageWork& work);
  void await_completion(Lock& lock, MessageWork& work);
  bool complete_moved(Lock& lock);
  void await_any(Lock& lock);
  void serve();

  void finish(ipc::Deadline deadline);
  void end_thread();

  void fail_with_group();
  bool waiters_suffice() const;
  std::vector<Rank> missing();

  const std::shared_ptr<ipc::Group> group_;
  const std::shared_ptr<DeviceOps> devices_;
  std::atomic<uint64_t> next_number_{0};
  ipc::Mailbox mailbox_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable completed_;  // apart, as waking the service thread takes long
  std::vector<MessageWorkPtr> open_;   // messages not done when last checked
  std::thread thread_;
  int waiting_ = 0;     // threads that wait for a message, and move all messages
  int completing_ = 0;  // works whose data a thread copies to their tensors
  bool accepting_ = true, closed_ = false, polling_ = false;
};

}  // namespace pycollect::dist
