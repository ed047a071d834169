#include "work.h"

#include <atomic>
#include <chrono>
#include <deque>
#include <thread>

#include "threads.h"

namespace pycollect {
namespace {

class Queue {
 public:
  Queue() {
    std::thread([this] { serve(); }).detach();
  }

  void push(std::shared_ptr<Work> work) {
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
      std::shared_ptr<Work> work = std::move(waiting_.front());
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
  std::deque<std::shared_ptr<Work>> waiting_;
  std::atomic<int> open_{0};  // enqueued and not yet run
  std::thread::id server_;
};

// Never destroyed: its thread may outlive main. A forked child, which has no such thread, makes its
// own.
std::atomic<Queue*> queue_{nullptr};
std::mutex making_;
[[maybe_unused]] const int registered =
    pthread_atfork([] { making_.lock(); }, [] { making_.unlock(); },
                   [] {
                     queue_ = nullptr;
                     making_.unlock();
                   });

Queue& queue() {
  const std::lock_guard lock(making_);
  if (queue_ == nullptr) queue_ = new Queue;
  return *queue_;
}

}  // namespace

bool Work::wait(std::optional<double> seconds) {
  std::unique_lock lock(mutex_);
  auto done = [&] { return done_; };
  if (!seconds)
    finished_.wait(lock, done);
  else if (!finished_.wait_for(lock, std::chrono::duration<double>(*seconds), done))
    return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

bool Work::is_completed() {
  const std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr Work::exception() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Work::run() noexcept {
  std::exception_ptr error;
  try {
    job_.run();
  } catch (...) {
    error = std::current_exception();
  }
  job_ = Job{};
  const std::lock_guard lock(mutex_);
  error_ = error;
  done_ = true;
  finished_.notify_all();
}

std::shared_ptr<Work> enqueue(Job job) {
  auto work = std::make_shared<Work>(std::move(job));
  queue().push(work);
  return work;
}

bool busy() {
  const Queue* q = queue_.load(std::memory_order_acquire);
  return q != nullptr && q->busy();
}

void drain() {
  if (Queue* q = queue_.load(std::memory_order_acquire)) q->drain();
}

}  // namespace pycollect
