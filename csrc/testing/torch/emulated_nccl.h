// Emulates NCCL's send and recv over a Gloo process group. Messages have no numbers. A transfer
// between two ranks begins when those before it have ended, whatever their direction. A work's
// wait() does not block the host. No work ends by a peer's death, and all count as complete when
// the group is aborted.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace pycollect::dist {

class EmulatedNccl final : public c10d::Backend {
 public:
  explicit EmulatedNccl(c10::intrusive_ptr<c10d::Backend> gloo);
  ~EmulatedNccl() override { abort(); }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  void abort() override { end_all(false); }
  int transfers() const { return transfers_; }  // number of those begun
  void hold() { *held_ = true; }                // no transfer moves any more
  void break_transfers() { end_all(true); }     // all transfers end with an error

 private:
  void end_all(bool with_error);
  class EmulatedTransfer;
  struct TransferQueue;
  c10::intrusive_ptr<c10d::Work> enqueue(int peer, c10::intrusive_ptr<EmulatedTransfer> transfer);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::atomic<int> transfers_{0};
  const std::shared_ptr<std::atomic<bool>> held_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::map<int, std::shared_ptr<TransferQueue>> queues_;  // [peer]
};

}  // namespace pycollect::dist
