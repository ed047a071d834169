// See queue.h. One call runs at a time, by whichever thread; what its future's callbacks do comes
// after it and holds up nobody: they may ask for more collectives and wait for them.
#include "queue.h"

#include <pthread.h>

#include "../../plan/error.h"
#include "../../shm/new_thread.h"

namespace pycollect::dist {

void Queue::require_open(const Call& call) const {
  if (closed_) throw CollectiveError(text(call.name, ": the group has been destroyed"));
}

c10::intrusive_ptr<QueuedWork> Queue::run(Call call) {
  Lock lock(mutex_);
  require_open(call);
  if (running_ || !waiting_.empty()) {
    lock.unlock();
    return push(std::move(call));
  }
  running_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    runner_->run(call);
  } catch (...) {
    error = std::current_exception();
    failed_ = true;
  }
  lock.lock();
  running_ = false;
  if (!hand_on()) run_waiting(lock);
  if (closed_ || !waiting_.empty()) changed_.notify_all();
  lock.unlock();
  if (error) std::rethrow_exception(error);
  return c10::make_intrusive<QueuedWork>(std::move(call), nullptr);
}

c10::intrusive_ptr<QueuedWork> Queue::push(Call call) {
  std::vector<Call> one;
  one.push_back(std::move(call));
  return push_all(std::move(one)).front();
}

std::vector<c10::intrusive_ptr<QueuedWork>> Queue::push_all(std::vector<Call> calls) {
  std::vector<c10::intrusive_ptr<QueuedWork>> works;
  if (calls.empty()) return works;
  for (Call& call : calls)
    works.push_back(c10::make_intrusive<QueuedWork>(std::move(call), shared_from_this()));
  Lock lock(mutex_);
  for (const auto& work : works) require_open(work->call_);
  waiting_.insert(waiting_.end(), works.begin(), works.end());
  try {
    see_to_it();
  } catch (const std::exception& error) {  // in their place: the other ranks come to them there
    Call& first = works.front()->call_;
    refuse_for(first, error);
    if (first.together) first.together->error = std::current_exception();
    lock.unlock();
    for (const auto& work : works) wait(*work);
    throw;
  }
  changed_.notify_all();
  return works;
}

// Under the lock: that there is a thread for what waits. The one that runs now will look again.
void Queue::see_to_it() {
  if (running_ || waiting_.empty() || idle_ > 0 || closed_) return;
  threads_.reserve(threads_.size() + 1);
  threads_.push_back(shm::new_thread([self = shared_from_this()] { self->serve(); }));
  ++idle_;
}

// The same of a thread that has run something: false if nobody else will run what waits.
bool Queue::hand_on() {
  try {
    see_to_it();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void Queue::run_waiting(Lock& lock) {
  while (!running_ && !waiting_.empty()) run_next(lock, true);
}

// `goes_on`: will this thread look for more by itself? Letting go of a tensor can take the
// interpreter's lock, whose holder may be waiting for ours: nothing is let go of under the lock.
void Queue::run_next(Lock& lock, bool goes_on) {
  c10::intrusive_ptr<QueuedWork> work = std::move(waiting_.front());
  waiting_.pop_front();
  running_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    runner_->run(work->call_);
  } catch (...) {
    error = std::current_exception();
    failed_ = true;
  }
  work->let_go();
  lock.lock();
  running_ = false;
  auto future = work->finish(error);
  const bool handed_on = (!future && goes_on) || hand_on();
  changed_.notify_all();
  lock.unlock();
  if (future) complete(*future, work->result(), error, work->passage());
  future.reset();
  work.reset();
  lock.lock();
  if (!handed_on && !goes_on) run_waiting(lock);
}

void Queue::serve() {
  pthread_setname_np(pthread_self(), "pycollect");
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return waiting_.empty() ? closed_ : !running_; });
    --idle_;
    if (waiting_.empty()) return;
    run_next(lock, true);
    ++idle_;
  }
}

void Queue::wait(QueuedWork& work) {
  forks_.require_none(work.name());
  Lock lock(mutex_);
  while (!work.is_done())
    if (!running_ && !waiting_.empty())
      run_next(lock, false);
    else
      changed_.wait(lock);
}

bool Queue::wait_until(QueuedWork& work, shm::Deadline deadline) {
  forks_.require_none(work.name());
  Lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return work.is_done(); });
}

void Queue::close(shm::Deadline deadline) {
  std::vector<std::thread> threads;
  {
    Lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    const auto empty = [&] { return !running_ && waiting_.empty(); };
    while (!empty() && shm::Clock::now() < deadline)
      if (!running_ && idle_ == 0)
        run_next(lock, true);
      else
        changed_.wait_until(lock, deadline);
    if (!empty()) {
      const std::shared_ptr<Runner> runner = runner_;  // another thread may close it, too
      lock.unlock();
      runner->abort("it was destroyed while collectives were under way");
      lock.lock();
    }
    while (!empty())
      if (running_)
        changed_.wait(lock);
      else
        run_next(lock, true);
    threads.swap(threads_);
    runner_.reset();  // and the group that it holds
  }
  for (std::thread& t : threads)
    if (t.get_id() == std::this_thread::get_id())
      t.detach();  // from a callback: this very thread ends by itself
    else
      t.join();
}

void Queue::abort(const std::string& why) {
  std::shared_ptr<Runner> runner;
  {
    const Lock lock(mutex_);
    runner = runner_;
  }
  if (runner) runner->abort(why);
}

std::vector<Rank> Queue::missing() {
  const Lock lock(mutex_);
  return runner_ && running_ ? runner_->missing() : std::vector<Rank>();
}

}  // namespace pycollect::dist
