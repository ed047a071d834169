// See process_queue.h. One call runs at a time, on any thread. The callbacks of its future run
// afterwards without blocking the queue: they may issue more collectives and wait for them.
#include "process_queue.h"

#include <pthread.h>

#include "../../group/new_thread.h"
#include "../../plan/error.h"

namespace pycollect::dist {

void ProcessQueue::require_open(const Call& call) const {
  if (closed_) throw CollectiveError(text(call.name, ": the group has been destroyed"));
}

// Returns the current exception. After one of the call's arguments, the group works on.
std::exception_ptr ProcessQueue::failure() {
  const std::exception_ptr error = std::current_exception();
  try {
    std::rethrow_exception(error);
  } catch (const CollectiveError&) {
    failed_ = true;
  } catch (...) {
  }
  return error;
}

CollectiveWorkPtr ProcessQueue::run(Call call) {
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
    error = failure();
  }
  call.event.reset();
  lock.lock();
  running_ = false;
  if (!try_ensure_thread()) run_queued(lock);
  if (closed_ || !waiting_.empty()) changed_.notify_all();
  lock.unlock();
  if (error) std::rethrow_exception(error);
  return c10::make_intrusive<CollectiveWork>(std::move(call), nullptr);
}

std::vector<CollectiveWorkPtr> ProcessQueue::push_all(std::vector<Call> calls) {
  std::vector<CollectiveWorkPtr> works;
  if (calls.empty()) return works;
  for (Call& call : bind_coalesced(calls))
    works.push_back(c10::make_intrusive<CollectiveWork>(std::move(call), shared_from_this()));
  Lock lock(mutex_);
  for (const auto& work : works) require_open(work->call());
  waiting_.insert(waiting_.end(), works.begin(), works.end());
  try {
    ensure_thread();
  } catch (const std::exception& error) {  // publishes a refusal in queue order: peers wait for it
    Call& first = works.front()->call();
    refuse_for(first, error);
    if (first.coalesced) first.coalesced->error = std::current_exception();
    lock.unlock();
    for (const auto& work : works) wait(*work);
    throw;
  }
  changed_.notify_all();
  return works;
}

// Starts a thread for the queued calls, unless one is idle or runs a call. Requires the lock.
void ProcessQueue::ensure_thread() {
  if (running_ || waiting_.empty() || idle_ > 0 || closed_) return;
  threads_.reserve(threads_.size() + 1);
  threads_.push_back(ipc::new_thread(
      [self = std::static_pointer_cast<ProcessQueue>(shared_from_this())] { self->serve(); }));
  ++idle_;
}

// Like ensure_thread(), but returns false if no thread can be started.
bool ProcessQueue::try_ensure_thread() {
  try {
    ensure_thread();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void ProcessQueue::run_queued(Lock& lock) {
  while (!running_ && !waiting_.empty()) run_next(lock, true);
}

// `continues`: this thread runs the next call, too. Releasing a tensor can take the GIL, whose
// holder may be waiting for this mutex, so tensors are released without the mutex.
void ProcessQueue::run_next(Lock& lock, bool continues) {
  CollectiveWorkPtr work = std::move(waiting_.front());
  waiting_.pop_front();
  running_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    runner_->run(work->call());
  } catch (...) {
    error = failure();
  }
  work->release();
  lock.lock();
  running_ = false;
  auto future = work->finish(error);
  const bool next_is_assigned = (!future && continues) || try_ensure_thread();
  changed_.notify_all();
  lock.unlock();
  if (future) complete(*future, work->result(), error, work->staging());
  future.reset();
  work.reset();
  lock.lock();
  if (!next_is_assigned && !continues) run_queued(lock);
}

void ProcessQueue::serve() {
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

void ProcessQueue::wait(CollectiveWork& work) {
  fork_guard_.require_not_forked(work.name());
  Lock lock(mutex_);
  while (!work.is_done())
    if (!running_ && !waiting_.empty())
      run_next(lock, false);
    else
      changed_.wait(lock);
}

bool ProcessQueue::wait_until(CollectiveWork& work, ipc::Deadline deadline) {
  fork_guard_.require_not_forked(work.name());
  Lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return work.is_done(); });
}

void ProcessQueue::close(ipc::Deadline deadline) {
  std::vector<std::thread> threads;
  {
    Lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    const auto empty = [&] { return !running_ && waiting_.empty(); };
    while (!empty() && ipc::Clock::now() < deadline)
      if (!running_ && idle_ == 0)
        run_next(lock, true);
      else
        changed_.wait_until(lock, deadline);
    if (!empty()) {
      const std::shared_ptr<CallRunner> runner = runner_;  // a concurrent close() may reset runner_
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
    runner_.reset();  // releases the group
  }
  for (std::thread& t : threads)
    if (t.get_id() == std::this_thread::get_id())
      t.detach();  // called from a callback: this thread ends by itself
    else
      t.join();
}

void ProcessQueue::abort(const std::string& why) {
  std::shared_ptr<CallRunner> runner;
  {
    const Lock lock(mutex_);
    runner = runner_;
  }
  if (runner) runner->abort(why);
}

std::vector<Rank> ProcessQueue::missing() {
  const Lock lock(mutex_);
  return runner_ && running_ ? runner_->missing() : std::vector<Rank>();
}

std::vector<Rank> ProcessQueue::behind() {
  const Lock lock(mutex_);
  return runner_ ? runner_->behind() : std::vector<Rank>();
}

}  // namespace pycollect::dist
