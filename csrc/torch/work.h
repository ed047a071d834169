// Collectives that run later, and what one holds of them.
#pragma once
#include <exception>
#include <memory>
#include <optional>

#include "prepared_call.h"

namespace pycollect {

class Work {
 public:
  explicit Work(Tensors results) : results_(std::move(results)) {}
  virtual ~Work() = default;

  // False when the time ran out first; throws what the collective threw. On GPUs it is the callers'
  // streams that wait, and the host only if a time is given.
  virtual bool wait(std::optional<double> seconds) = 0;
  virtual bool is_completed() = 0;
  virtual std::exception_ptr exception() = 0;
  const Tensors& results() const { return results_; }

 private:
  const Tensors results_;
};

// Hands a job to where it runs: on the host to the queue, whose one thread takes jobs in the order
// in which they were asked for, so that the ranks of a process never compete for its cores.
std::shared_ptr<Work> enqueue(PreparedCall job);

bool busy();  // is anything in the queue or under way?

// Returns when everything that was enqueued before has run: what runs at once keeps its place
// behind what is still under way. Costs one load when nothing is.
void drain();

}  // namespace pycollect
