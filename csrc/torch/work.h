// Asynchronous collectives on lists: the queue that runs them, and the Work that a caller waits
// for.
#pragma once
#include <exception>
#include <memory>
#include <optional>

#include "list_call.h"

namespace pycollect {

class Work {
 public:
  explicit Work(Tensors results) : results_(std::move(results)) {}
  virtual ~Work() = default;

  // Returns false if the collective is not done after `seconds`. Throws the collective's error. On
  // GPUs the current streams wait; the host waits only if `seconds` is given.
  virtual bool wait(std::optional<double> seconds) = 0;
  virtual bool is_completed() = 0;
  virtual std::exception_ptr exception() = 0;
  const Tensors& results() const { return results_; }

 private:
  const Tensors results_;
};

// Enqueues a call: on its GPUs, or in the queue of host calls. A single thread runs that queue in
// order, so that calls do not compete for the cores.
std::shared_ptr<Work> enqueue(ListCall call);

bool busy();  // whether a host call is queued or running

// Waits until the queue of host calls is empty, so that a call that runs at once keeps its order
// behind queued ones. Costs one load if the queue is empty.
void drain();

}  // namespace pycollect
