// The way of one call's tensors from their devices to what the executor reads and writes, and back.
// Begun in the caller's thread, ended in whichever runs the call; nothing moves before `depart`.
#pragma once
#include <memory>
#include <vector>

#include "../../shm/executor.h"
#include "devices.h"

namespace pycollect::dist {

class Passage {
 public:
  virtual ~Passage() = default;
  // Where the executor finds the tensor's elements, in logical order.
  virtual shm::Span enter(const at::Tensor& tensor, bool reads, bool writes) = 0;
  virtual void depart() = 0;   // after the last tensor
  virtual bool arrived() = 0;  // is everything there that is to be read?
  virtual void land() = 0;     // after the executor: sends the results on their way
  virtual bool landed() = 0;   // are they where the tensors are?
  // What follows on the current streams of the calling thread finds them there.
  virtual void join() = 0;
  virtual void let_go() = 0;  // of the tensors: the call has ended
  virtual const std::vector<at::Device>& on() const = 0;
  virtual Devices& devices() const = 0;
};

}  // namespace pycollect::dist
