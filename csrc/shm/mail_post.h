// One rank's mailbox with its lock: lets one thread at a time move things, rings for whoever may
// sleep for what was moved, and decides what a thread of this rank sleeps on.
#pragma once
#include <mutex>

#include "mail_incoming.h"
#include "mail_outgoing.h"

namespace pycollect::shm {

class Mailbox::Post {
 public:
  explicit Post(Group& group);

  Group& group() const { return group_; }
  void send(const MailPtr& mail);
  void receive(const MailPtr& mail);
  void supply(Mail& mail, uint64_t there);
  bool try_move();
  bool idle() const { return open_.load(std::memory_order_acquire) == 0; }
  void fail(const std::exception_ptr& error);
  void ring_own();
  // Ranks that something under way depends on. If it is all the same which, those that are there.
  std::vector<Rank> missing();
  std::vector<Rank> anybody() const;

  struct Condition {
    std::function<bool()> holds;
    std::function<std::vector<Rank>()> missing;  // whom it depends on
    Mail* mail = nullptr;                        // whose end it is, if of any
  };
  // Moves things until it holds. Throws what Group::await does, and then all that is under way has
  // failed with it.
  void wait(const Condition& until, const Occasion& occasion);

 private:
  class Watch;  // a thread that waits
  using Locked = std::unique_lock<std::mutex>;
  Locked lock() { return Locked(mutex_); }
  bool move(Locked locked);
  bool unlock(Locked locked);
  void request(const char* operation, const std::function<void()>& ask);
  template <class Act>
  void guard(const Act& act);
  void move_all(const Condition& until);

  Group& group_;
  Origin origin_;  // a forked child must not touch the queues of its parent
  MailArea area_;
  Rank me_;
  Effects effects_;
  Outgoing outgoing_;
  Incoming incoming_;
  std::mutex mutex_;
  std::atomic<uint64_t> requests_{0};
  std::atomic<int> open_{0};   // transfers that are not done
  std::atomic<int> awake_{0};  // threads that wait and do not sleep
  Bell beside_;                // of those who sleep while another thread is awake
};

}  // namespace pycollect::shm
