#include "work.h"

#include <ATen/ThreadLocalState.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "gpus.h"
#include "profiler_range.h"

namespace pycollect {
namespace {

class QueuedWork : public Work {
 public:
  explicit QueuedWork(PreparedCall job) : Work(job.results), job_(std::move(job)) {
    if (is_profiled()) callers_.emplace();
  }

  bool wait(std::optional<double> seconds) override;
  bool is_completed() override;
  std::exception_ptr exception() override;
  void run() noexcept;

 private:
  PreparedCall job_;
  std::optional<at::ThreadLocalState> callers_;  // where the caller's profiler is found
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::exception_ptr error_;
};

bool QueuedWork::wait(std::optional<double> seconds) {
  std::unique_lock lock(mutex_);
  auto done = [&] { return done_; };
  if (!seconds)
    finished_.wait(lock, done);
  else if (!finished_.wait_for(lock, std::chrono::duration<double>(*seconds), done))
    return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

bool QueuedWork::is_completed() {
  const std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr QueuedWork::exception() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void QueuedWork::run() noexcept {
  std::exception_ptr error;
  try {
    std::optional<at::ThreadLocalStateGuard> as_the_caller;
    if (callers_) as_the_caller.emplace(*callers_);
    job_.run();
  } catch (...) {
    error = std::current_exception();
  }
  job_ = PreparedCall{.call = job_.call};
  callers_.reset();
  const std::lock_guard lock(mutex_);
  error_ = error;
  done_ = true;
  finished_.notify_all();
}

class JobQueue {
 public:
  JobQueue() {
    std::thread([this] { serve(); }).detach();
  }

  void push(std::shared_ptr<QueuedWork> work) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(work));
    }
    open_.fetch_add(1, std::memory_order_relaxed);
    changed_.notify_all();
  }

  bool busy() const { return open_.load(std::memory_order_acquire) != 0; }

  void drain() {
    if (!busy() || std::this_thread::get_id() == server_) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !busy(); });
  }

 private:
  void serve() {
    server_ = std::this_thread::get_id();
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      std::shared_ptr<QueuedWork> work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work->run();
      work.reset();  // tensors go before anybody who drains goes on
      lock.lock();
      open_.fetch_sub(1, std::memory_order_release);
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedWork>> waiting_;
  std::atomic<int> open_{0};  // enqueued and not yet run
  std::thread::id server_;
};

// Never destroyed: its thread may outlive main. A forked child, which has no such thread, makes its
// own.
std::atomic<JobQueue*> queue_{nullptr};
std::mutex making_;
[[maybe_unused]] const int registered =
    pthread_atfork([] { making_.lock(); }, [] { making_.unlock(); },
                   [] {
                     queue_ = nullptr;
                     making_.unlock();
                   });

JobQueue& queue() {
  const std::lock_guard lock(making_);
  if (queue_ == nullptr) queue_ = new JobQueue;
  return *queue_;
}

}  // namespace

std::shared_ptr<Work> enqueue(PreparedCall job) {
  if (job.on_gpus()) return enqueue_on_gpus(std::move(job));
  auto work = std::make_shared<QueuedWork>(std::move(job));
  queue().push(work);
  return work;
}

bool busy() {
  const JobQueue* q = queue_.load(std::memory_order_acquire);
  return q != nullptr && q->busy();
}

void drain() {
  if (JobQueue* q = queue_.load(std::memory_order_acquire)) q->drain();
}

}  // namespace pycollect
