#include "work.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "gpus.h"
#include "profiler_range.h"
#include "threads.h"

namespace pycollect {
namespace {

class QueuedWork : public Work {
 public:
  explicit QueuedWork(ListCall call) : Work(call.results), call_(std::move(call)) {
    if (CallerProfile::is_active()) caller_.emplace();
  }

  bool wait(std::optional<double> seconds) override;
  bool is_completed() override;
  std::exception_ptr exception() override;
  void run() noexcept;

 private:
  ListCall call_;
  std::optional<CallerProfile> caller_;  // none: no profiler
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
    const ProfilerRange range(call_.name, caller_);
    call_.run(threads());
  } catch (...) {
    error = std::current_exception();
  }
  call_ = ListCall{.name = call_.name};
  const std::lock_guard lock(mutex_);
  error_ = error;
  done_ = true;
  finished_.notify_all();
}

class WorkQueue {
 public:
  WorkQueue() {
    std::thread thread([this] { serve(); });
    thread_id_ = thread.get_id();
    thread.detach();
  }

  void push(std::shared_ptr<QueuedWork> work) {
    {
      const std::lock_guard lock(mutex_);
      queued_.push_back(std::move(work));
      unfinished_.fetch_add(1, std::memory_order_relaxed);  // before the call can run
    }
    changed_.notify_all();
  }

  bool busy() const { return unfinished_.load(std::memory_order_acquire) != 0; }

  void drain() {
    if (!busy() || std::this_thread::get_id() == thread_id_) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !busy(); });
  }

 private:
  void serve() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [&] { return !queued_.empty(); });
      std::shared_ptr<QueuedWork> work = std::move(queued_.front());
      queued_.pop_front();
      lock.unlock();
      work->run();
      work.reset();  // frees its tensors before drain() returns
      lock.lock();
      unfinished_.fetch_sub(1, std::memory_order_release);
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedWork>> queued_;
  std::atomic<int> unfinished_{0};  // calls that are queued or running
  std::thread::id thread_id_;
};

// The queue of host calls. It is never destroyed, because its thread may outlive main. A forked
// child has no such thread and creates its own queue.
std::atomic<WorkQueue*> queue_{nullptr};
std::mutex creation_mutex_;
[[maybe_unused]] const int fork_handlers_registered =
    pthread_atfork([] { creation_mutex_.lock(); }, [] { creation_mutex_.unlock(); },
                   [] {
                     queue_ = nullptr;
                     creation_mutex_.unlock();
                   });

WorkQueue& queue() {
  const std::lock_guard lock(creation_mutex_);
  if (queue_ == nullptr) queue_ = new WorkQueue;
  return *queue_;
}

}  // namespace

std::shared_ptr<Work> enqueue(ListCall call) {
  if (call.on_gpus()) {
    GpuCalls& calls = gpu_calls(call.first_gpu().type());
    return calls.enqueue(std::move(call));
  }
  auto work = std::make_shared<QueuedWork>(std::move(call));
  queue().push(work);
  return work;
}

bool busy() {
  const WorkQueue* q = queue_.load(std::memory_order_acquire);
  return q != nullptr && q->busy();
}

void drain() {
  if (WorkQueue* q = queue_.load(std::memory_order_acquire)) q->drain();
}

}  // namespace pycollect
