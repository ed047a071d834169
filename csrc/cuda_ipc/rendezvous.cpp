// See rendezvous.h. In each step a rank first acts alone, then reads whether the step succeeded on
// all ranks. A device whose work does not end is abandoned, with all memory that it may still
// access.
#include "rendezvous.h"

#include <algorithm>
#include <cstring>

#include "../plan/error.h"
#include "self_test.h"

namespace pycollect::cuda_ipc {
namespace {

template <std::size_t n>
void write(std::array<char, n>& to, std::string_view from) {
  to = {};
  std::memcpy(to.data(), from.data(), std::min(from.size(), n - 1));
}

class CudaIpcRendezvous {
 public:
  CudaIpcRendezvous(const CudaIpcSetup& setup, const ipc::OpContext& context)
      : setup_(setup),
        context_(context),
        group_(*setup.group),
        signal_pad_(group_.signal_pad(), group_.world()),
        mine_(signal_pad_.entry(group_.rank())),
        step_(mine_.steps.load()) {}

  CudaIpcResult run() {
    std::string why = share_memory();
    if (why.empty()) why = test_streams();
    if (why.empty()) return {make_communicator(), {}};
    release();
    return {{}, why};
  }

  // Releases all memory, except what a device whose work does not end may still access.
  void release() noexcept {
    const bool stuck = self_test_ != nullptr && !self_test_->drain();
    self_test_.reset();
    if (registered_ && stuck) registered_->abandon();
    if (staging_buffer_ && stuck) staging_buffer_->abandon();
    staging_buffer_.reset();
    registered_.reset();
  }

 private:
  // One step: runs `act` and waits for every rank. Returns all ranks' failures, or "".
  template <class F>
  std::string run_step(F&& act) {
    RendezvousStepResult& result = mine_.results[++step_ & 1];
    result.succeeded = true;
    try {
      act();
    } catch (const std::exception& error) {
      result.succeeded = false;
      write(result.why, error.what());
    }
    mine_.steps.store(step_, std::memory_order_release);
    wait_for_all();
    std::string why;
    for (Rank r = 0; r < group_.world(); ++r) {
      const RendezvousStepResult& theirs = signal_pad_.entry(r).results[step_ & 1];
      if (!theirs.succeeded)
        why += text(why.empty() ? "" : "; ", "rank ", r, ": ", ipc::read_text(theirs.why));
    }
    return why;
  }

  void wait_for_all() {
    const auto behind = [&] {
      std::vector<Rank> ranks;
      for (Rank r = 0; r < group_.world(); ++r)
        if (signal_pad_.entry(r).steps.load(std::memory_order_acquire) < step_) ranks.push_back(r);
      return ranks;
    };
    group_.await([&] { return behind().empty(); }, {.missing = behind}, context_);
  }

  std::string share_memory() {
    const Device device = setup_.stream.device;
    std::string why = run_step([&] {
      write(mine_.gpu, setup_.gpu->identity(device));
      staging_buffer_ = std::make_unique<StagingBuffer>(
          *setup_.gpu,
          StagingBufferParams{device, group_.rank(), group_.world(), setup_.buffer_bytes});
      registered_ =
          std::make_unique<RegisteredHostMemory>(*setup_.gpu, device, signal_pad_.base(),
                                                 signal_pad_.registered_bytes(), group_.segment());
      self_test_ = std::make_unique<SelfTest>(setup_.gpu, *staging_buffer_, signal_pad_,
                                              registered_->base());
      self_test_->clear();
      mine_.handle = staging_buffer_->handle();
      watchdog_ = std::make_unique<Watchdog>(setup_.group, signal_pad_);
    });
    if (!why.empty()) return why;
    why = run_step([&] {
      for (Rank r = 0; r < group_.world(); ++r)
        if (r != group_.rank()) staging_buffer_->open(r, signal_pad_.entry(r).handle);
    });
    if (why.empty()) why = run_step([&] { self_test_->write_to_all(); });
    if (why.empty()) why = run_step([&] { self_test_->read_from_all(); });
    return why;
  }

  std::string test_streams() {
    std::string why = run_step([&] { self_test_->block_streams(); });
    if (why.empty()) why = run_step([&] { self_test_->signal_all(); });
    if (why.empty()) why = run_step([&] { self_test_->wait_for_all(); });
    return why;
  }

  std::shared_ptr<CudaIpcCommunicator> make_communicator() {
    const bool stuck = !self_test_->drain();
    self_test_.reset();
    if (stuck) staging_buffer_->abandon();  // not freed at the end: the device may still access it
    if (stuck) registered_->abandon();
    run_step([] {});  // a barrier: no rank signals a run before all have drained
    const auto same = [&](Rank r) { return signal_pad_.entry(r).gpu == mine_.gpu; };
    bool multi_gpu = false;
    for (Rank r = 0; r < group_.world(); ++r) multi_gpu |= !same(r);
    return std::make_shared<CudaIpcCommunicator>(CudaIpcCommunicator::Resources{
        setup_.group, setup_.gpu, setup_.stream, signal_pad_, setup_.symmetric_memory,
        std::move(staging_buffer_), std::move(registered_), std::move(watchdog_), multi_gpu});
  }

  const CudaIpcSetup& setup_;
  const ipc::OpContext& context_;
  ipc::Group& group_;
  const SignalPad signal_pad_;
  PeerEntry& mine_;
  uint64_t step_;
  std::unique_ptr<RegisteredHostMemory> registered_;
  std::unique_ptr<StagingBuffer> staging_buffer_;
  std::unique_ptr<SelfTest> self_test_;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace

CudaIpcResult rendezvous(const CudaIpcSetup& setup, const ipc::OpContext& context) {
  CudaIpcRendezvous attempt(setup, context);
  try {
    return attempt.run();
  } catch (...) {
    attempt.release();
    throw;
  }
}

}  // namespace pycollect::cuda_ipc
