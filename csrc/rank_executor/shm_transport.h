// Host transport: staging buffers and symmetric heaps are in the group's shared memory, the rank's
// own threads copy and reduce, and signals are the ranks' progress counters in that memory.
#pragma once
#include "../cpu/executor.h"
#include "../cpu/step_runner.h"
#include "transport.h"

namespace pycollect::ipc {

class ShmTransport : public Transport {
 public:
  ShmTransport(Group& group, cpu::ParallelFor parallel_for, const Hosts* hosts = nullptr)
      : Transport(group, hosts), parallel_for_(std::move(parallel_for)) {}

  Topology topology(bool in_tensors) const override {
    return in_tensors ? Topology::shm_symmetric : Topology::shm_buffers;
  }
  bool may_use_tensors(std::size_t bytes) const override;
  std::optional<uint64_t> registered_offset(const std::byte* at) const override;
  std::size_t buffer_bytes() const override { return group().layout().sizes.buffer_bytes; }
  uint64_t next_run() const override { return group().run_number(); }

  void begin(const CollectiveRequest& request, const OpContext& context) override;
  void reserve(const RankProgram& rank_program, const Group::StagingRegions& regions,
               bool irregular) override;
  Agreement agree(const CallFingerprint& mine, ChunkLoop& loop) override;
  void check_exposed(std::size_t bytes) override;

  std::byte* buffer(Rank r, uint64_t run) const override { return group().staging_buffer(r, run); }
  std::byte* tensor(Rank r, OperandBuffer where) const override;
  void wait_for_previous(uint64_t run) override { ipc::wait_for_previous(group(), run, *context_); }
  void wait(Rank r, uint64_t value) override { group().await(r, value, *context_); }
  void signal(uint64_t value) override { group().advance(value); }
  void end(uint64_t value, bool signalled) override;
  void launch(const Rows& rows) override;

 protected:
  void use_context(const OpContext& context) { context_ = &context; }

 private:
  void run(const Rows& rows, std::size_t begin, std::size_t end) const;
  void run(const Instruction& instruction, void* const* at, std::size_t count) const;
  void run_parallel(const Rows& rows) const;
  std::size_t item_of(const Instruction& instruction, std::size_t operand) const;

  const cpu::ParallelFor parallel_for_;
  // The members below belong to the current call.
  const CollectiveRequest* request_ = nullptr;
  const OpContext* context_ = nullptr;
  std::optional<cpu::RowRunner> row_;
  bool non_temporal_ = false;
  // Regions that the ranks in the mask have committed for this call.
  std::vector<std::pair<uint64_t, Group::StagingRegions>> unmapped_;
};

}  // namespace pycollect::ipc
