// send and recv of one rank of a group, and their works.
#pragma once
#include <optional>

#include "../../send_recv/transfer.h"
#include "work.h"

namespace pycollect::dist {

struct P2POp {
  at::Tensor tensor;
  std::optional<Rank> peer;  // none: receive from any rank
  int tag;
  std::chrono::milliseconds timeout;
  bool receives;

  const char* name() const { return receives ? "recv" : "send"; }
};

class PointToPoint : public WorkOwner {
 public:
  PointToPoint(int world, std::shared_ptr<DeviceOps> devices)
      : devices_(std::move(devices)), world_(world) {}
  virtual WorkPtr post(const P2POp& op) = 0;
  // Throws if post() would, before data moves. Returns whether the tensor is on a device.
  bool check(const P2POp& op) const;

 protected:
  const std::shared_ptr<DeviceOps> devices_;
  std::atomic<uint64_t> next_number_{0};

 private:
  const int world_;
};

class MessageWork final : public GroupWork {
 public:
  // `staging` stages a device tensor; null: a host tensor. The owner lives until the work is
  // done, or a wait throws. A work that is kept, longer perhaps, keeps `kept`.
  MessageWork(const P2POp& op, uint64_t number, Rank rank, std::shared_ptr<TensorStaging> staging,
              std::weak_ptr<WorkOwner> owner, std::shared_ptr<WorkOwner> kept = {});

  int sourceRank() const override;
  uint64_t getSequencenumber() const override { return number_; }
  Tensors result() override { return {op.tensor}; }
  const char* name() const override { return op.name(); }
  std::chrono::milliseconds limit() const override { return op.timeout; }
  TensorStaging* staging() const override { return staging_.get(); }

  // For the owner.
  const P2POp op;
  const Rank rank;                       // of this side
  at::Tensor data;                       // what moves: the tensor, or a copy of it
  std::atomic<Rank> source{-1};          // of a receive that has been matched
  ipc::TransferPtr transfer;             // null: between threads
  std::shared_ptr<ProfilerEvent> event;  // null: no profiler
  ipc::Envelope envelope() const;
  // Returns "recv #3 from rank 1 of group 'default' with tag 0 on [2, 3] float32".
  std::string describe(const std::string& of_group) const;

 private:
  std::shared_ptr<WorkOwner> owner() const override { return owner_.lock(); }

  const uint64_t number_;
  const std::shared_ptr<TensorStaging> staging_;
  const std::weak_ptr<WorkOwner> owner_;
  const std::shared_ptr<WorkOwner> kept_;
};
using MessageWorkPtr = c10::intrusive_ptr<MessageWork>;

}  // namespace pycollect::dist
