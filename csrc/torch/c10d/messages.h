// send and recv between processes. Every message makes progress by itself, independently of
// collectives. A waiting thread moves all messages; if none waits, a service thread does, which
// starts before the first message.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "../../group/system.h"
#include "device_messages.h"

namespace pycollect::dist {

class Messages final : public PointToPoint, public std::enable_shared_from_this<Messages> {
 public:
  // `remote`: the ranks on other hosts, if there are any. Messages name peers by their ranks.
  Messages(std::shared_ptr<ipc::Group> group, const DeviceOps& devices,
           std::shared_ptr<ipc::RemotePeers> remote = nullptr);

  WorkPtr send(const P2POp& op) override;
  WorkPtr receive(const P2POp& op) override;
  bool check(const P2POp& op, const char* name, bool receives) const override;
  // Refuses new messages and lets pending ones finish until the deadline, or until a signal handler
  // raises. If any are left then, aborts the group, which fails them. Returns what it has raised.
  std::exception_ptr close(ipc::Deadline deadline);
  void abort(const std::string& why) { group_->abort(why); }
  const ipc::Group& group() const { return *group_; }
  bool progress();  // returns true if any message has moved

 private:
  friend class MessageWork;
  using Lock = std::unique_lock<std::mutex>;
  class PostingScope;  // defined in messages.cpp
  WorkPtr submit(const P2POp& op, const char* name, bool receives);
  std::optional<Rank> mailbox_peer(std::optional<Rank> rank) const;
  bool is_gone(Rank peer, uint64_t gone) const {  // `gone`: as Group::gone returns
    return peer < group_->world() ? (gone >> peer & 1) != 0 : mailbox_.is_gone(peer);
  }
  WorkPtr track(c10::intrusive_ptr<MessageWork> work);
  using MissingRanks = std::function<std::vector<Rank>()>;
  // Moves all messages until `done` returns true; `transfer`, if given, is the awaited transfer.
  // Throws what Mailbox::wait throws.
  void await(const std::function<bool()>& done, const MissingRanks& missing,
             ipc::Transfer* transfer, const ipc::OpContext& context);
  void wait(MessageWork& work, ipc::Deadline deadline);
  bool wait_until(MessageWork& work, ipc::Deadline deadline);
  void forget(const MessageWork& work);  // removes a settled message
  bool settle_done(Lock& lock);
  void await_any(Lock& lock);
  void serve();

  void stop_accepting(ipc::Deadline deadline);
  void finish(ipc::Deadline deadline);
  void end_thread();

  void fail_with_group();
  bool any_moved_or_due(ipc::Deadline before) const;
  ipc::OpContext most_urgent() const;
  bool waiters_suffice() const;
  std::vector<Rank> missing(const MessageWork& work, uint64_t gone) const;
  std::vector<Rank> missing();

  const std::shared_ptr<ipc::Group> group_;
  ipc::Mailbox mailbox_;
  DeviceMessages on_devices_;
  const ipc::ForkGuard fork_guard_;
  std::mutex mutex_;  // on_devices_ works without it
  std::condition_variable changed_;
  std::vector<c10::intrusive_ptr<MessageWork>> open_;  // messages not done when last checked
  std::thread thread_;
  int waiting_ = 0;  // threads that wait for a message, and move all messages
  int posting_ = 0;  // threads inside submit()
  bool accepting_ = true, closed_ = false, polling_ = false;
  uint64_t next_number_ = 0;
};

}  // namespace pycollect::dist
