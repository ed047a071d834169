// Collectives that run later: one thread takes them in the order in which they were asked for, so
// that the ranks of a process never compete with each other for its cores.
#pragma once
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "job.h"

namespace pycollect {

class Work {
 public:
  explicit Work(Job job) : job_(std::move(job)), results_(job_.results) {}

  // False when the time ran out first; throws what the collective threw.
  bool wait(std::optional<double> seconds);
  bool is_completed();
  std::exception_ptr exception();
  const Tensors& results() const { return results_; }

  void run() noexcept;  // the queue's business

 private:
  Job job_;
  const Tensors results_;
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::exception_ptr error_;
};

// Hands a job to the queue's thread, which is started by the first one.
std::shared_ptr<Work> enqueue(Job job);

bool busy();  // is anything enqueued or under way?

// Returns when everything that was enqueued before has run: what runs at once keeps its place
// behind what is still under way. Costs one load when nothing is.
void drain();

}  // namespace pycollect
