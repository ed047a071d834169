// Queue of a group's collectives, in call order.
#pragma once
#include <mutex>
#include <vector>

#include "call.h"
#include "work.h"

namespace pycollect::dist {

using CollectiveWorkPtr = c10::intrusive_ptr<CollectiveWork>;

class CallQueue : public std::enable_shared_from_this<CallQueue> {
 public:
  virtual ~CallQueue() = default;
  // Runs the call before it returns, and throws its error; or enqueues it.
  virtual CollectiveWorkPtr run(Call call) = 0;
  // Enqueues the calls as one operation: all of them run or none, with no other call between them.
  virtual std::vector<CollectiveWorkPtr> push_all(std::vector<Call> calls) = 0;
  CollectiveWorkPtr push(Call call);
  // Makes the peers of the next call throw `call.refusal`.
  virtual void refuse(Call call) { run(std::move(call)); }

  virtual void wait(CollectiveWork& work) = 0;
  virtual bool wait_until(CollectiveWork& work, ipc::Deadline deadline) = 0;
  // Lets the ranks on which an unfinished work depends continue, if they need this thread's
  // permission. Called where a caller may poll the work, or wait for its future.
  virtual void give_way(CollectiveWork&) {}
  // Called where a caller finds its work done, instead of wait().
  virtual void end_wait() {}
  // Counts futures of unfinished works. Called with the mutex locked.
  virtual void count_open_futures(int) {}
  virtual void abort(const std::string& why) = 0;
  virtual std::vector<Rank> missing() = 0;  // ranks that have not begun the running call
  // Ranks that have made fewer calls than this one, as far as is known: those of this host.
  virtual std::vector<Rank> behind() = 0;
  virtual std::mutex& mutex() = 0;  // guards the state of every work of this queue
};

inline CollectiveWorkPtr CallQueue::push(Call call) {
  std::vector<Call> one;
  one.push_back(std::move(call));
  return push_all(std::move(one)).front();
}

}  // namespace pycollect::dist
