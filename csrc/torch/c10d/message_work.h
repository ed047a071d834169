// The Work of one send or receive between processes.
#pragma once
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../../send_recv/mailbox.h"
#include "point_to_point.h"
#include "staging/tensor_staging.h"
#include "work.h"

namespace pycollect::dist {

class Messages;

class MessageWork final : public GroupWork {
 public:
  struct MessageInfo {
    const char* name;
    uint64_t number;
    std::optional<Rank> peer;
    int tag;
    std::chrono::milliseconds timeout;
    bool receives;
  };
  // `staging` stages a device tensor; null: a host tensor.
  MessageWork(const MessageInfo& info, at::Tensor tensor, std::shared_ptr<TensorStaging> staging,
              std::shared_ptr<Messages> messages);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  Tensors result() override { return {tensor_}; }
  TensorStaging* staging() const override { return staging_.get(); }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<Future> getFuture() override;
  c10::intrusive_ptr<Future> getFutureResult() override { return getFuture(); }

 private:
  friend class DeviceMessages;
  friend class Messages;
  std::string describe() const;
  ipc::Envelope envelope() const;
  Rank peer() const;
  // Posts the message to the mailbox.
  void post(ipc::Mailbox& mailbox);
  void fail(std::exception_ptr error);  // for an error before the message is posted
  ipc::TransferPtr transfer() const;
  bool is_moved() const;                             // true also after a failure
  bool is_moved_or_due(ipc::Deadline before) const;  // true also after a failure
  void finish();  // throws the transfer's error, or copies the data to the tensor
  void end_event();
  // Completes a message that was moved or has failed. Thread-safe, and may be called repeatedly.
  void settle();
  std::shared_ptr<Messages> messages() const;
  std::vector<Rank> missing(const ipc::Mailbox& mailbox) const;  // ranks that it depends on
  ipc::Deadline due() const;  // deadline of its future; Deadline::max() without a future
  ipc::OpContext context(ipc::Deadline deadline) const {
    return {info_.name, info_.number, deadline, deadline - ipc::clamped(info_.timeout)};
  }

  const MessageInfo info_;
  const at::Tensor tensor_;
  const std::shared_ptr<TensorStaging> staging_;
  at::Tensor dense_;  // the tensor, or a contiguous copy
  std::byte* memory_ = nullptr;
  std::shared_ptr<Messages> messages_;   // null once the message is settled
  const std::vector<Rank> world_ranks_;  // see GroupSettings
  ipc::TransferPtr transfer_;            // null until the message is posted
  mutable std::mutex mutex_;
  bool settled_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<Future> future_;
  ipc::Deadline due_ = ipc::Deadline::max();
  std::shared_ptr<ProfilerEvent> event_;
};

}  // namespace pycollect::dist
