// The transport through the memory of the ranks' GPUs: buffers are in everybody's slab, tensors
// perhaps in everybody's tracts, launches on the rank's stream move what is in them, and signals
// are those of streams. A call has run when all of it is enqueued.
#pragma once
#include "../shm/transport.h"
#include "dock.h"

namespace pycollect::slabs {

class GpuTransport final : public shm::Transport {
 public:
  explicit GpuTransport(std::shared_ptr<Dock> dock)
      : Transport(dock->group()), dock_(std::move(dock)) {}

  Ground ground(bool in_tensors) const override {
    return in_tensors ? dock_->open_ground() : dock_->ground();
  }
  bool may_use_tensors(Collective collective, std::size_t bytes) const override;
  std::optional<uint64_t> place_of(const std::byte* at, std::size_t bytes) const override {
    return dock_->tracts().place_of(at, bytes);
  }
  std::size_t buffer_bytes() const override { return dock_->slab().slot_bytes(); }
  uint64_t next_run() const override { return dock_->run(); }

  void begin(const shm::Request& request, const shm::Occasion& occasion) override;
  shm::Agreed agree(const shm::Statement& mine, shm::ChunkLoop& loop) override;
  void reach_tensors(const shm::Script& script, std::size_t bytes) override;

  std::byte* buffer(Rank r, uint64_t run) const override { return dock_->slab().slot(r, run); }
  std::byte* tensor(Rank r, shm::Where where) const override { return reached_[index(r, where)]; }
  void settle(uint64_t run) override;
  void wait(Rank r, uint64_t value) override { dock_->await(r, value, *occasion_); }
  void signal(uint64_t value) override { dock_->tell(value); }
  void end(uint64_t value, bool) override { dock_->begin_run(value >> shm::kTaskBits); }
  void launch(const shm::Rows& rows) override;

 private:
  static std::size_t index(Rank r, shm::Where where) {
    return 2 * static_cast<std::size_t>(r) + (where == shm::Where::output);
  }
  std::byte* find(Rank r, shm::Where where) const;

  const std::shared_ptr<Dock> dock_;
  // Of the call that runs.
  const shm::Request* request_ = nullptr;
  const shm::Occasion* occasion_ = nullptr;
  Launch launch_ = {};
  std::vector<std::byte*> reached_;  // [rank][where]: others' tensors, as this device finds them
};

}  // namespace pycollect::slabs
