// See process_queue.h. One call runs at a time, on any thread. While the callbacks of its future
// run, only calls that they have made may begin: they may wait for these, also in ways that this
// queue does not see, so other threads run them.
#include "process_queue.h"

#include <pthread.h>

#include <algorithm>
#include <ranges>

#include "../../plan/error.h"
#include "../log.h"
#include "interpreter.h"

namespace pycollect::dist {

// While a callback waits for a call that no callback has made, that call must run. Its place then
// depends on the rank, unless all ranks wait for it in their callbacks.
class ProcessQueue::WaitingInCallback {
 public:
  WaitingInCallback(const ProcessQueue& queue, GroupWork& work) {
    const uint64_t scope = static_cast<CollectiveWork&>(work).call().scope;
    for (CallbackScope* s = CallbackScope::innermost; s != nullptr; s = s->outer) {
      if (s->queue != &queue) continue;
      if (s->id == scope) return;
      ++s->waits_outside;
      open_.push_back(s);
    }
  }
  ~WaitingInCallback() {
    for (CallbackScope* const s : open_) --s->waits_outside;
  }
  WaitingInCallback(const WaitingInCallback&) = delete;
  WaitingInCallback& operator=(const WaitingInCallback&) = delete;

 private:
  std::vector<CallbackScope*> open_;
};

void ProcessQueue::require_open(const GroupCall& call) const {
  if (closed_) throw group_destroyed(call.name);
}

ProcessQueue::CallbackScope* ProcessQueue::scope_of_thread() const {
  CallbackScope* scope = CallbackScope::innermost;
  while (scope != nullptr && scope->queue != this) scope = scope->outer;
  return scope;
}

// Returns the queue whose first call is the next one; null: there is none, or callbacks that may
// make it are running.
ProcessQueue::Works* ProcessQueue::next() {
  for (CallbackScope& scope : std::views::reverse(callbacks_)) {
    if (!scope.waiting.empty()) return &scope.waiting;
    if (!scope.returned && scope.waits_outside == 0 && !passes_callbacks_) return nullptr;
  }
  return waiting_.empty() ? nullptr : &waiting_;
}

bool ProcessQueue::is_empty() const {
  return waiting_.empty() && std::ranges::all_of(callbacks_, [](const CallbackScope& scope) {
           return scope.waiting.empty();
         });
}

// Returns whether a call that is made now, by the callbacks of `scope` or by none, comes next.
bool ProcessQueue::is_next(const CallbackScope* scope) const {
  if (running_ || !is_empty()) return false;
  return callbacks_.empty() ? scope == nullptr : scope == &callbacks_.back();
}

void ProcessQueue::begin_run() {
  running_ = true;
  runner_thread_ = std::this_thread::get_id();
}

void ProcessQueue::end_run() {
  running_ = false;
  runner_thread_ = {};
}

// A signal handler runs within the call that the signal has interrupted.
void ProcessQueue::require_not_inside(const char* name) const {
  if (runs_here())
    throw CollectiveError(text(name, ": called by a signal handler in a call of the same group, ",
                               "behind which it would wait for ever"));
}

// Returns whether a waiting thread may run the next call. The thread that handles signals runs no
// callbacks: they would swallow what a handler raises.
bool ProcessQueue::may_run() {
  Works* const queue = running_ ? nullptr : next();
  if (queue == nullptr) return false;
  return !handles_signals() || !queue->front()->has_future() || !try_ensure_thread();
}

// Returns the current exception. If a signal handler has raised it, sets `raised` to it, and
// returns an error of the call.
std::exception_ptr ProcessQueue::failure(const GroupCall& call, std::exception_ptr* raised) {
  const std::exception_ptr error = std::current_exception();
  try {
    std::rethrow_exception(error);
  } catch (const ipc::Interruption&) {
    if (raised == nullptr) return error;
    *raised = error;
    return std::make_exception_ptr(PeerLost(text(call.name, ": a signal interrupted this rank")));
  } catch (const std::invalid_argument& mismatch) {
    if (futures_ &&
        std::string_view(mismatch.what()).find("must make the same call") != std::string_view::npos)
      return std::make_exception_ptr(std::invalid_argument(text(
          mismatch.what(), "; calls of a future's callback come directly after the future's call ",
          "only if the callback is added before the next call is made")));
  } catch (...) {
  }
  return error;
}

void ProcessQueue::run(const CollectiveWorkPtr& work) {
  GroupCall& call = work->call();
  Lock lock(mutex_);
  require_open(call);
  require_not_inside(call.name);
  if (!is_next(scope_of_thread())) {
    lock.unlock();
    return push_all({work});
  }
  begin_run();
  lock.unlock();
  std::exception_ptr error;
  try {
    runner_->run(call);
  } catch (...) {
    error = failure(call, nullptr);
  }
  call.event.reset();
  lock.lock();
  end_run();
  if (!try_ensure_thread()) run_queued(lock);
  if (closed_ || !is_empty()) changed_.notify_all();
  lock.unlock();
  if (error) std::rethrow_exception(error);
  work->finish(nullptr);  // without the mutex: no other thread has the work
}

void ProcessQueue::push_all(const std::vector<CollectiveWorkPtr>& works) {
  if (works.empty()) return;
  coalesce(works);
  Lock lock(mutex_);
  CallbackScope* const scope = scope_of_thread();
  for (const auto& work : works) {
    require_open(work->call());
    work->call().scope = scope != nullptr ? scope->id : 0;
    work->call().queued = ipc::Clock::now();
    work->enqueue(shared_from_this());
  }
  Works& waiting = scope == nullptr ? waiting_ : scope->waiting;
  waiting.insert(waiting.end(), works.begin(), works.end());
  try {
    ensure_thread();
  } catch (const std::exception& error) {  // publishes a refusal in queue order: peers wait for it
    GroupCall& first = works.front()->call();
    refuse_for(first, error);
    if (first.coalesced) first.coalesced->error = std::current_exception();
    lock.unlock();
    for (const auto& work : works) wait(*work);
    throw;
  }
  changed_.notify_all();
}

// Starts a thread for the queued calls, unless one is idle or runs a call. Requires the lock.
void ProcessQueue::ensure_thread() {
  if (running_ || is_empty() || idle_ > 0 || closed_) return;
  threads_.reserve(threads_.size() + 1);
  threads_.push_back(ipc::new_thread([self = shared_from_this()] { self->serve(); }));
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
  while (!running_ && next() != nullptr) run_next(lock, true);
}

// `continues`: this thread runs the next call, too. Releasing a tensor can take the GIL, whose
// holder may be waiting for this mutex, so tensors are released without the mutex. Returns what a
// signal handler has raised during the call, or null.
std::exception_ptr ProcessQueue::run_next(Lock& lock, bool continues) {
  Works& queue = *next();
  CollectiveWorkPtr work = std::move(queue.front());
  queue.pop_front();
  std::erase_if(callbacks_, [](const auto& s) { return s.returned && s.waiting.empty(); });
  begin_run();
  lock.unlock();
  std::exception_ptr error, raised;
  try {
    runner_->run(work->call());
  } catch (...) {
    error = failure(work->call(), &raised);
  }
  work->release();
  lock.lock();
  end_run();
  if (!callbacks_.empty()) callbacks_.back().moved = ipc::Clock::now();
  auto future = work->finish(error);
  if (future) run_callbacks(lock, work, std::move(future), error);
  const bool next_is_assigned = continues || try_ensure_thread();
  changed_.notify_all();
  lock.unlock();
  work.reset();
  lock.lock();
  if (!next_is_assigned) run_queued(lock);
  return raised;
}

void ProcessQueue::run_callbacks(Lock& lock, const CollectiveWorkPtr& work,
                                 c10::intrusive_ptr<Future> future, std::exception_ptr error) {
  CallbackScope& scope =
      callbacks_.emplace_back(CallbackScope{this, work, ++scopes_, ipc::Clock::now()});
  try_ensure_thread();    // looks whether the callbacks return in time
  changed_.notify_all();  // the work is done
  lock.unlock();
  scope.outer = std::exchange(CallbackScope::innermost, &scope);
  try {
    complete(*future, work->result(), error, work->staging());
  } catch (const std::exception& failed) {
    warn(text("the future of ", work->name(), " cannot be completed: ", failed.what()));
  }
  CallbackScope::innermost = scope.outer;
  future.reset();
  lock.lock();
  scope.returned = true;
  if (scope.waiting.empty())
    callbacks_.remove_if([&](const CallbackScope& s) { return &s == &scope; });
}

// Waits for a change, until the deadline at most. Callbacks that hold up a call for longer than the
// call's timeout end the group. Throws what a signal handler raises.
void ProcessQueue::sleep(Lock& lock, ipc::Deadline deadline) {
  ipc::Deadline late = ipc::Deadline::max();
  if (!running_ && !is_empty() && next() == nullptr) {
    const auto blocked =
        std::ranges::find_if(callbacks_, [](const CallbackScope& s) { return !s.waiting.empty(); });
    const Works& held_up = blocked == callbacks_.end() ? waiting_ : blocked->waiting;
    CollectiveWork& first = *held_up.front();
    const auto age = ipc::Clock::now() - std::max(callbacks_.back().moved, first.call().queued);
    late = ipc::deadline_after(first.limit()) - age;
  }
  const bool looks = handles_signals();
  ipc::Deadline until = std::min(deadline, late);
  if (looks) until = std::min(until, ipc::Clock::now() + ipc::kSignalInterval);
  if (until == ipc::Deadline::max())
    changed_.wait(lock);
  else
    changed_.wait_until(lock, until);
  if (ipc::Clock::now() >= late && !running_ && !is_empty() && next() == nullptr)
    abort_queue(lock, true);
  if (!looks) return;
  lock.unlock();
  std::exception_ptr raised;
  try {
    check_signals();
  } catch (...) {
    raised = std::current_exception();
  }
  lock.lock();
  if (raised) std::rethrow_exception(raised);
}

// Aborts the group, so that the queued calls fail at once, also those behind callbacks. `late`: the
// callbacks have not returned in time.
void ProcessQueue::abort_queue(Lock& lock, bool late) {
  const std::shared_ptr<CallRunner> runner = runner_;  // a concurrent close() may reset runner_
  const CollectiveWorkPtr of = late ? callbacks_.back().of : nullptr;
  passes_callbacks_ = true;
  lock.unlock();
  if (runner && !late) runner->abort("it was destroyed while collectives were under way");
  if (runner && late)
    runner->time_out(text("a callback of ", of->name(), " #", of->getSequencenumber(),
                          " has not returned, and the calls behind it wait for that"));
  lock.lock();
  changed_.notify_all();
}

void ProcessQueue::serve() {
  pthread_setname_np(pthread_self(), "pycollect");
  Lock lock(mutex_);
  for (;;) {
    while (is_empty() ? !closed_ : running_ || next() == nullptr) sleep(lock, ipc::Deadline::max());
    --idle_;
    if (is_empty()) return;
    run_next(lock, true);
    ++idle_;
  }
}

void ProcessQueue::wait(GroupWork& work) {
  if (work.is_done()) return;
  fork_guard_.require_not_forked(work.name());
  Lock lock(mutex_);
  const WaitingInCallback in_callback(*this, work);
  if (!work.is_done()) require_not_inside(work.name());
  try {
    while (!work.is_done())
      if (may_run()) {
        if (const auto raised = run_next(lock, false)) std::rethrow_exception(raised);
      } else {
        sleep(lock, ipc::Deadline::max());
      }
  } catch (const ipc::Interruption&) {
    end_interrupted(lock, work);
    throw;
  }
}

// Aborts the group, and waits until the call no longer uses its tensors.
void ProcessQueue::end_interrupted(Lock& lock, GroupWork& work) {
  const SignalsDeferred deferred;
  const std::shared_ptr<CallRunner> runner = runner_;
  passes_callbacks_ = true;
  lock.unlock();
  if (runner) runner->abort(text("a signal interrupted it in ", work.name()));
  lock.lock();
  while (!work.is_done() && !closed_)
    if (!running_ && next() != nullptr)
      run_next(lock, true);
    else
      changed_.wait(lock);
}

bool ProcessQueue::wait_until(GroupWork& work, ipc::Deadline deadline) {
  if (work.is_done()) return true;
  fork_guard_.require_not_forked(work.name());
  Lock lock(mutex_);
  if (!work.is_done()) require_not_inside(work.name());
  const WaitingInCallback in_callback(*this, work);
  try {
    while (!work.is_done() && ipc::Clock::now() < deadline) sleep(lock, deadline);
  } catch (const ipc::Interruption&) {
    end_interrupted(lock, work);
    throw;
  }
  return work.is_done();
}

std::exception_ptr ProcessQueue::close(ipc::Deadline deadline) {
  std::vector<std::thread> threads;
  std::exception_ptr raised;
  {
    Lock lock(mutex_);
    closed_ = true;
    if (scope_of_thread() != nullptr) passes_callbacks_ = true;
    changed_.notify_all();
    if (runs_here()) return close_inside(lock);
    const auto empty = [&] { return !running_ && is_empty(); };
    while (!empty() && !raised && ipc::Clock::now() < deadline)
      if (!running_ && idle_ == 0 && next() != nullptr)
        raised = run_next(lock, true);
      else
        try {
          sleep(lock, deadline);
        } catch (const ipc::Interruption&) {
          raised = std::current_exception();
        }
    const SignalsDeferred deferred;
    if (!empty()) abort_queue(lock, false);
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
  return raised;
}

// Closes the queue in a signal handler, within a call that this thread runs: that call fails when
// the handler has returned, and with it the queued ones.
std::exception_ptr ProcessQueue::close_inside(Lock& lock) {
  abort_queue(lock, false);
  for (std::thread& t : std::exchange(threads_, {})) t.detach();  // they hold this queue
  return nullptr;
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
  return runner_ ? runner_->missing() : std::vector<Rank>();
}

}  // namespace pycollect::dist
