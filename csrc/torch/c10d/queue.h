// The collectives of a group, in the order in which they were asked for. Whoever waits for one that
// has not begun runs what is before it and then it; threads of the queue do it when nobody waits.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "call.h"
#include "forks.h"
#include "runner.h"
#include "work.h"

namespace pycollect::dist {

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  explicit Queue(std::shared_ptr<Runner> runner) : runner_(std::move(runner)) {}

  // Runs it in this thread when nothing is before it, and throws what goes wrong; else enqueues it.
  c10::intrusive_ptr<QueuedWork> run(Call call);
  c10::intrusive_ptr<QueuedWork> push(Call call);
  // One behind the other, and nothing between them.
  std::vector<c10::intrusive_ptr<QueuedWork>> push_all(std::vector<Call> calls);

  // Until the work is done, with this thread's help; or until a moment, without.
  void wait(QueuedWork& work);
  bool wait_until(QueuedWork& work, shm::Deadline deadline);

  void abort(const std::string& why);
  std::vector<Rank> missing();  // from what runs now
  // Takes nothing more, gives what is in it until then and aborts it; returns when nothing is left
  // to run and no thread to run it.
  void close(shm::Deadline deadline);

  bool has_failed() const { return failed_; }  // any call: somebody has heard of it

  std::mutex& mutex() { return mutex_; }  // guards what every work of this queue says of itself

 private:
  using Lock = std::unique_lock<std::mutex>;
  void run_next(Lock& lock, bool goes_on);
  void run_waiting(Lock& lock);
  void see_to_it();
  bool hand_on();
  void serve();
  void require_open(const Call& call) const;

  std::shared_ptr<Runner> runner_;  // until it is closed
  const Forks forks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<QueuedWork>> waiting_;
  bool running_ = false, closed_ = false;
  std::atomic<bool> failed_{false};
  int idle_ = 0;  // threads that wait for something to do
  std::vector<std::thread> threads_;
};

}  // namespace pycollect::dist
