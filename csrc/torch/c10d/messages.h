// send and recv: each moves on by itself, whatever the group's collectives do. Whoever waits moves
// all of them; a thread does when nobody waits, made when the first does not complete at once.
#pragma once
#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../../shm/mailbox.h"
#include "forks.h"
#include "work.h"

namespace pycollect::dist {

class Messages;

class MessageWork final : public c10d::Work {
 public:
  struct Ask {
    const char* name;
    uint64_t number;
    std::chrono::milliseconds timeout;
    bool receives;
  };
  MessageWork(const Ask& ask, at::Tensor tensor, std::shared_ptr<Messages> messages);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return transfer_->peer(); }
  Tensors result() override { return {tensor_}; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

 private:
  friend class Messages;
  std::byte* memory() const;
  std::string described() const;
  shm::Envelope envelope(int tag) const;
  // What is left to do when the transfer is done; by any thread, any number of times.
  void settle();
  std::shared_ptr<Messages> messages() const;
  shm::Occasion occasion(shm::Deadline deadline) const {
    return {ask_.name, ask_.number, deadline};
  }

  const Ask ask_;
  const at::Tensor tensor_;
  at::Tensor dense_;                    // the tensor, or a copy of one that is not contiguous
  std::shared_ptr<Messages> messages_;  // until it is settled
  std::shared_ptr<shm::Mailbox::Transfer> transfer_;
  mutable std::mutex mutex_;
  bool settled_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<Future> future_;
};

class Messages : public std::enable_shared_from_this<Messages> {
 public:
  explicit Messages(std::shared_ptr<shm::Group> group);

  struct Letter {
    at::Tensor tensor;
    std::optional<Rank> peer;  // a receive from anybody has none
    int tag;
    std::chrono::milliseconds timeout;
  };
  c10::intrusive_ptr<c10d::Work> send(const Letter& letter);
  c10::intrusive_ptr<c10d::Work> receive(const Letter& letter);
  // Takes nothing more, gives what is under way some time, then aborts the group.
  void close(std::chrono::milliseconds grace);
  void abort(const std::string& why) { group_->abort(why); }
  void progress() { mailbox_.progress(); }

 private:
  friend class MessageWork;
  using Lock = std::unique_lock<std::mutex>;
  c10::intrusive_ptr<MessageWork> make(const Letter& letter, const char* name, bool receives);
  c10::intrusive_ptr<c10d::Work> started(c10::intrusive_ptr<MessageWork> work);
  void wait(MessageWork& work, shm::Deadline deadline);
  bool wait_until(MessageWork& work, shm::Deadline deadline);
  void forget(const MessageWork& work);
  bool settle_done(Lock& lock);
  void move_on(Lock& lock);
  void serve();

  const std::shared_ptr<shm::Group> group_;
  shm::Mailbox mailbox_;
  const Forks forks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<c10::intrusive_ptr<MessageWork>> open_;  // not done when they were last looked at
  std::thread thread_;
  int waiting_ = 0;  // threads that move things because they wait for one
  bool closed_ = false, dozes_ = false;
  uint64_t made_ = 0;
};

}  // namespace pycollect::dist
