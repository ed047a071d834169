// What a collective returns: it has run, or is in a group's queue.
#pragma once
#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "call.h"

namespace pycollect::dist {

class Queue;
using Future = c10::ivalue::Future;

// Of a list of tensors: those of `passage`, if there is one, where the devices have them.
c10::intrusive_ptr<Future> new_future(const Passage* passage = nullptr);
void complete(Future& future, const Tensors& results, std::exception_ptr error,
              const Passage* passage = nullptr);

// A time limit of `wait`, where none is given as zero.
inline bool is_limit(std::chrono::milliseconds timeout) { return timeout.count() > 0; }
[[noreturn]] void throw_unfinished(const std::string& operation, std::chrono::milliseconds timeout);

class OwnWork : public c10d::Work {
 public:
  virtual const Passage* passage() const = 0;  // of tensors on devices; null: there are none
};

class QueuedWork final : public OwnWork {
 public:
  QueuedWork(Call call, std::shared_ptr<Queue> queue)  // no queue: it has run
      : call_(std::move(call)), queue_(std::move(queue)), done_(queue_ == nullptr) {}

  bool isCompleted() override;  // on the devices, too
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return -1; }
  uint64_t getSequencenumber() const override { return call_.number; }
  Tensors result() override { return call_.results; }
  const Passage* passage() const override { return call_.passage.get(); }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

 private:
  friend class Queue;
  const char* name() const { return call_.name; }
  std::string described() const;
  bool is_done() const { return done_.load(std::memory_order_acquire); }  // it has run
  void let_go();  // of what only the run needed
  // Under the queue's lock; what it returns is then to be completed without.
  c10::intrusive_ptr<Future> finish(std::exception_ptr error);

  Call call_;
  const std::shared_ptr<Queue> queue_;
  std::atomic<bool> done_;
  std::exception_ptr error_;
  c10::intrusive_ptr<Future> future_;
};

// Several as one: what `endCoalescing` returns.
class JointWork final : public c10d::Work {
 public:
  explicit JointWork(std::vector<c10::intrusive_ptr<c10d::Work>> parts)
      : parts_(std::move(parts)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  Tensors result() override;
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

}  // namespace pycollect::dist
