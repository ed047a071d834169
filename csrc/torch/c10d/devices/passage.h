// The way of one call's tensors from their devices to what the executor reads and writes, and back.
// Begun in the caller's thread, ended in whichever runs the call; nothing moves before `depart`.
#pragma once
#include <memory>
#include <vector>

#include "../../../shm/executor.h"
#include "devices.h"

namespace pycollect::dist {

class Passage {
 public:
  virtual ~Passage() = default;
  // Where the executor finds the tensor's elements, in logical order.
  virtual shm::Span enter(const at::Tensor& tensor, bool reads, bool writes) = 0;
  virtual void depart() = 0;   // after the last tensor
  virtual bool arrived() = 0;  // may the executor begin?
  // After the executor: sends the results on their way.
  virtual void land(const shm::Occasion& occasion) = 0;
  // Instead of that, when it did not get to its end: no results.
  virtual void cut_short(const shm::Occasion&) {}
  virtual bool landed() = 0;  // are they where the tensors are, or never will be?
  // What has gone wrong since the executor was done; null: nothing yet.
  virtual std::exception_ptr failure() const { return nullptr; }
  // What finds them there; null: the transport through the host's memory.
  virtual shm::Transport* transport() { return nullptr; }
  // What follows on the current streams of the calling thread finds them there.
  virtual void join() = 0;
  virtual void let_go() = 0;  // of the tensors: the call has ended
  virtual const std::vector<at::Device>& on() const = 0;
  virtual Devices& devices() const = 0;
};

}  // namespace pycollect::dist
