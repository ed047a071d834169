// The stream-ordered CUDA IPC transport: staging buffers are in the ranks' exported GPU memory, and
// tensors may be in symmetric GPU memory. Launches on the rank's stream move data, and streams
// signal each other. A call returns when all of its work is enqueued.
#pragma once
#include "../rank_executor/transport.h"
#include "communicator.h"

namespace pycollect::cuda_ipc {

class CudaIpcTransport final : public ipc::Transport {
 public:
  explicit CudaIpcTransport(std::shared_ptr<CudaIpcCommunicator> communicator)
      : Transport(communicator->group()), communicator_(std::move(communicator)) {}

  Topology topology(bool in_tensors) const override {
    return in_tensors ? communicator_->zero_copy_topology() : communicator_->topology();
  }
  bool may_use_tensors(Collective collective, std::size_t bytes) const override;
  std::optional<uint64_t> registered_offset(const std::byte* at, std::size_t bytes) const override {
    return communicator_->symmetric_memory().offset_of(at, bytes);
  }
  std::size_t buffer_bytes() const override {
    return communicator_->staging_buffer().buffer_bytes();
  }
  uint64_t next_run() const override { return communicator_->run(); }

  void begin(const ipc::CollectiveRequest& request, const ipc::OpContext& context) override;
  ipc::Agreement agree(const ipc::CallFingerprint& mine, ipc::ChunkLoop& loop) override;
  void check_exposed(const ipc::RankProgram& rank_program, std::size_t bytes) override;

  std::byte* buffer(Rank r, uint64_t run) const override {
    return communicator_->staging_buffer().staging_buffer(r, run);
  }
  std::byte* tensor(Rank r, ipc::OperandBuffer where) const override {
    return reached_[index(r, where)];
  }
  void wait_for_previous(uint64_t run) override;
  void wait(Rank r, uint64_t value) override { communicator_->wait(r, value, *context_); }
  void signal(uint64_t value) override { communicator_->signal(value); }
  void end(uint64_t value, bool) override { communicator_->begin_run(value >> ipc::kTaskBits); }
  void launch(const ipc::Rows& rows) override;

 private:
  static std::size_t index(Rank r, ipc::OperandBuffer where) {
    return 2 * static_cast<std::size_t>(r) + (where == ipc::OperandBuffer::output);
  }
  std::byte* find(Rank r, ipc::OperandBuffer where) const;
  bool copies_by_engine(const ipc::Rows& rows) const;
  void copy_by_engine(const ipc::Rows& rows);

  const std::shared_ptr<CudaIpcCommunicator> communicator_;
  // The next four members belong to the call that runs.
  const ipc::CollectiveRequest* request_ = nullptr;
  const ipc::OpContext* context_ = nullptr;
  Launch launch_ = {};
  std::vector<std::byte*> reached_;  // [rank][where]: addresses of peers' tensors on this device
};

}  // namespace pycollect::cuda_ipc
