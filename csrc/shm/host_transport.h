// The transport through the host: buffers and arenas are in the group's shared memory, the rank's
// own threads move what is in them, and signals are the ranks' counters there.
#pragma once
#include "../cpu/executor.h"
#include "../cpu/step_runner.h"
#include "transport.h"

namespace pycollect::shm {

class HostTransport final : public Transport {
 public:
  HostTransport(Group& group, cpu::ParallelFor parallel_for)
      : Transport(group), parallel_for_(std::move(parallel_for)) {}

  Ground ground(bool in_tensors) const override {
    return in_tensors ? Ground::arenas : Ground::slots;
  }
  bool may_use_tensors(Collective collective, std::size_t bytes) const override;
  std::optional<uint64_t> place_of(const std::byte* at, std::size_t bytes) const override;
  std::size_t buffer_bytes() const override { return group().layout().sizes.slot_bytes; }
  uint64_t next_run() const override { return run_number(group()); }

  void begin(const Request& request, const Occasion& occasion) override;
  Agreed agree(const Statement& mine, ChunkLoop& loop) override;
  void reach_tensors(const Script& script, std::size_t bytes) override;

  std::byte* buffer(Rank r, uint64_t run) const override { return group().slot(r, run); }
  std::byte* tensor(Rank r, Where where) const override;
  void settle(uint64_t run) override { shm::settle(group(), run, *occasion_); }
  void wait(Rank r, uint64_t value) override { group().await(r, value, *occasion_); }
  void signal(uint64_t value) override { group().advance(value); }
  void end(uint64_t value, bool signalled) override;
  void launch(const Rows& rows) override;

 private:
  void run(const Rows& rows, std::size_t begin, std::size_t end) const;
  void run(const Move& move, void** at, std::size_t count) const;
  void share_out(const Rows& rows) const;

  const cpu::ParallelFor parallel_for_;
  // Of the call that runs.
  const Request* request_ = nullptr;
  const Occasion* occasion_ = nullptr;
  std::optional<cpu::RowRunner> row_;
  bool streamed_ = false;
};

}  // namespace pycollect::shm
