// See emulated_nccl.h.
#include "emulated_nccl.h"

#include <condition_variable>
#include <deque>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "bind.h"

namespace pycollect {
namespace dist {

class EmulatedNccl::EmulatedTransfer final : public c10d::Work {
 public:
  EmulatedTransfer(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<at::Tensor> tensors,
                   int peer, bool sends)
      : gloo_(std::move(gloo)), tensors_(std::move(tensors)), peer_(peer), sends_(sends) {}

  void run() {
    try {
      (sends_ ? gloo_->send(tensors_, peer_, 0) : gloo_->recv(tensors_, peer_, 0))->wait();
      finish();
    } catch (const std::exception&) {
      // The peer has died, which NCCL does not notice.
    }
  }
  void end(bool with_error) {
    finish(with_error ? std::make_exception_ptr(std::runtime_error("NCCL has failed")) : nullptr);
  }
  bool wait(std::chrono::milliseconds) override { return true; }

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::vector<at::Tensor> tensors_;
  const int peer_;
  const bool sends_;
};

// The transfers with one peer, which a thread runs one after the other.
struct EmulatedNccl::TransferQueue {
  const std::shared_ptr<std::atomic<bool>> held;
  std::mutex mutex = {};
  std::condition_variable changed = {};
  std::deque<c10::intrusive_ptr<EmulatedTransfer>> waiting = {};
  c10::intrusive_ptr<EmulatedTransfer> running = {};
  bool ended = false;

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return ended || (!running && !waiting.empty() && !*held); });
      if (ended) return;
      running = std::move(waiting.front());
      waiting.pop_front();
      const auto transfer = running;
      lock.unlock();
      transfer->run();
      lock.lock();
      if (transfer->isCompleted()) running.reset();
    }
  }
};

EmulatedNccl::EmulatedNccl(c10::intrusive_ptr<c10d::Backend> gloo)
    : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

c10::intrusive_ptr<c10d::Work> EmulatedNccl::send(std::vector<at::Tensor>& tensors, int to, int) {
  return enqueue(to, c10::make_intrusive<EmulatedTransfer>(gloo_, tensors, to, true));
}
c10::intrusive_ptr<c10d::Work> EmulatedNccl::recv(std::vector<at::Tensor>& tensors, int from, int) {
  return enqueue(from, c10::make_intrusive<EmulatedTransfer>(gloo_, tensors, from, false));
}

c10::intrusive_ptr<c10d::Work> EmulatedNccl::enqueue(
    int peer, c10::intrusive_ptr<EmulatedTransfer> transfer) {
  const std::lock_guard lock(mutex_);
  auto& queue = queues_[peer];
  if (!queue) {
    queue = std::make_shared<TransferQueue>(held_);
    std::thread([queue] { queue->serve(); }).detach();
  }
  ++transfers_;
  const std::lock_guard hold(queue->mutex);
  queue->waiting.push_back(transfer);
  queue->changed.notify_all();
  return transfer;
}

void EmulatedNccl::end_all(bool with_error) {
  const std::lock_guard lock(mutex_);
  for (const auto& [peer, queue] : queues_) {
    const std::lock_guard hold(queue->mutex);
    queue->ended = true;
    for (const auto& transfer : queue->waiting) transfer->end(with_error);
    if (queue->running) queue->running->end(with_error);
    queue->changed.notify_all();
  }
}

}  // namespace dist

void bind_emulated_nccl(py::module_& m) {
  py::module_::import("torch.distributed");  // binds the base class
  py::class_<dist::EmulatedNccl, c10d::Backend, c10::intrusive_ptr<dist::EmulatedNccl>>(
      m, "EmulatedNccl")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>(), py::arg("gloo"))
      .def("transfers", &dist::EmulatedNccl::transfers)
      .def("hold", &dist::EmulatedNccl::hold)
      .def("break_transfers", &dist::EmulatedNccl::break_transfers);
}

}  // namespace pycollect
