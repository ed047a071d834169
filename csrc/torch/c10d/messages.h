// send and recv: each moves on by itself, whatever the group's collectives do. Whoever waits moves
// all of them; a thread does when nobody waits, made before the first has been asked for. What
// is sent from a device is posted when it has come from there, in order with the rest for its peer.
// A large one goes in pieces, as they come. What comes from a device rings no bell: while there is
// such, whoever waits looks again and again.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../../shm/mailbox.h"
#include "devices/ladder.h"
#include "devices/message_staging.h"
#include "forks.h"
#include "work.h"

namespace pycollect::dist {

class Messages;

class MessageWork final : public OwnWork {
 public:
  struct Ask {
    const char* name;
    uint64_t number;
    std::optional<Rank> peer;
    int tag;
    std::chrono::milliseconds timeout;
    bool receives;
  };
  // `passage` is that of a tensor on a device.
  MessageWork(const Ask& ask, at::Tensor tensor, std::shared_ptr<Passage> passage,
              std::shared_ptr<Messages> messages);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return peer(); }
  Tensors result() override { return {tensor_}; }
  const Passage* passage() const override { return passage_.get(); }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

 private:
  friend class Messages;
  std::string described() const;
  shm::Envelope envelope() const;
  Rank peer() const;
  // Hands it to the mailbox.
  void post(shm::Mailbox& mailbox);
  // Of a message in pieces: hands on those that have come. Returns whether any are yet to.
  bool advance(shm::Mailbox& mailbox);
  bool supply(shm::Mailbox& mailbox);
  void fail(std::exception_ptr error);  // before it was posted
  shm::TransferPtr transfer() const;
  bool is_moved() const;                   // or has failed
  bool calls(shm::Deadline before) const;  // is moved, or must be by then
  void finish();                           // what is left to do when it has been moved
  // After it was moved or has failed; by any thread, any number of times.
  void settle();
  std::shared_ptr<Messages> messages() const;
  std::vector<Rank> missing(const shm::Mailbox& mailbox) const;  // whom it depends on
  shm::Deadline due() const;  // of its future, which itself can be waited for without a limit
  shm::Occasion occasion(shm::Deadline deadline) const {
    return {ask_.name, ask_.number, deadline};
  }

  const Ask ask_;
  const at::Tensor tensor_;
  const std::shared_ptr<Passage> passage_;
  MessageStaging* const staging_;  // the passage, if it goes in pieces
  at::Tensor dense_;               // the tensor, or a copy of one that is not contiguous
  std::byte* memory_ = nullptr;
  std::shared_ptr<Messages> messages_;  // until it is settled
  shm::TransferPtr transfer_;           // null until it is posted
  mutable std::mutex mutex_;
  bool settled_ = false, in_hand_ = false;  // in_hand_: a device of this process has the next of it
  std::exception_ptr error_;
  std::exception_ptr failure_;  // of a device, while the mailbox has to do with the memory
  c10::intrusive_ptr<Future> future_;
  shm::Deadline due_ = shm::Deadline::max();
};

class Messages : public std::enable_shared_from_this<Messages> {
 public:
  Messages(std::shared_ptr<shm::Group> group, std::shared_ptr<const Ladder> ladder);

  struct Letter {
    at::Tensor tensor;
    std::optional<Rank> peer;  // a receive from anybody has none
    int tag;
    std::chrono::milliseconds timeout;
  };
  c10::intrusive_ptr<c10d::Work> send(const Letter& letter);
  c10::intrusive_ptr<c10d::Work> receive(const Letter& letter);
  // Throws if those would, before anything moves. Returns whether the tensor is on a device.
  bool check(const Letter& letter, const char* name, bool receives) const;
  // Takes nothing more, and gives what is under way until then; what is left fails with the group,
  // which is aborted for it.
  void close(shm::Deadline deadline);
  void abort(const std::string& why) { group_->abort(why); }
  bool progress();  // returns whether messages have moved

 private:
  friend class MessageWork;
  using Lock = std::unique_lock<std::mutex>;
  class Asking;  // messages.cpp
  c10::intrusive_ptr<c10d::Work> ask(const Letter& letter, const char* name, bool receives);
  c10::intrusive_ptr<c10d::Work> started(c10::intrusive_ptr<MessageWork> work);
  using Suspects = std::function<std::vector<Rank>()>;
  // Moves all messages until `over`, which the end of a transfer may be. Throws what the mailbox
  // does.
  void await(const std::function<bool()>& over, const Suspects& missing, shm::Transfer* transfer,
             const shm::Occasion& occasion);
  void wait(MessageWork& work, shm::Deadline deadline);
  bool wait_until(MessageWork& work, shm::Deadline deadline);
  void forget(const MessageWork& work);  // which is settled
  bool settle_done(Lock& lock);
  void move_on(Lock& lock);
  void serve();

  void take_no_more(shm::Deadline deadline);
  void finish(shm::Deadline deadline);
  void end_thread();

  void post(const c10::intrusive_ptr<MessageWork>& work);
  std::shared_ptr<Passage> passage_of(const at::Tensor& tensor) const;
  void fail_with_group();
  void advance_staged();
  bool glances() const { return leaves_ || coming_; }

  void dispatch(const c10::intrusive_ptr<MessageWork>& work);
  void dispatch_arrived();
  bool leave(const c10::intrusive_ptr<MessageWork>& work);
  void drop_leaving(const std::exception_ptr& error);
  bool any_calls(shm::Deadline before) const;
  shm::Occasion most_urgent() const;
  bool waiters_suffice() const;
  std::vector<Rank> missing(const MessageWork& work, uint64_t gone) const;
  std::vector<Rank> missing();

  const std::shared_ptr<shm::Group> group_;
  const std::shared_ptr<const Ladder> ladder_;
  // With streams of their own: whatever a collective's waits for is no matter of a message.
  const std::shared_ptr<Devices> devices_;
  shm::Mailbox mailbox_;
  const Forks forks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<c10::intrusive_ptr<MessageWork>> open_;  // not done when they were last looked at
  std::thread thread_;
  int waiting_ = 0;  // threads that move things because they wait for one
  int asking_ = 0;   // threads that are in `ask`
  bool takes_more_ = true, closed_ = false, dozes_ = false;
  uint64_t made_ = 0;

  std::mutex leaving_mutex_;  // held while the mailbox is given what it guards; never under mutex_
  std::deque<c10::intrusive_ptr<MessageWork>> leaving_;  // sends that have not been posted
  std::atomic<bool> leaves_{false};                      // are there any?

  // Under mutex_ it is only tried, and nothing but a mailbox is locked under it.
  std::mutex staged_mutex_;
  std::vector<c10::intrusive_ptr<MessageWork>> staged_;  // posted, and not all pieces handed on
  std::atomic<bool> any_staged_{false};
  std::atomic<bool> coming_{false};  // does any of them come from a device?
};

}  // namespace pycollect::dist
