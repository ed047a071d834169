// The Work of an asynchronous call on GPUs.
#pragma once
#include <mutex>

#include "gpu_calls.h"

namespace pycollect {

class GpuWork final : public Work {
 public:
  // `ends`: an event after the call on each of its devices. `owned`: torch's allocator does not
  // reuse the tensors' memory before these events, whenever the tensors are released. `capture`:
  // the number of the capture that the call is in; 0: none.
  GpuWork(std::shared_ptr<GpuCalls> calls, PreparedCall prepared,
          std::vector<std::shared_ptr<cuda::SharedEvent>> ends, uint64_t capture, bool owned);
  ~GpuWork() override;

  bool wait(std::optional<double> seconds) override;
  bool is_completed() override;
  // Always null: errors are thrown when the call is enqueued.
  std::exception_ptr exception() override { return nullptr; }

 private:
  bool finished_within(double seconds);
  std::vector<cuda::Stream> current_streams() const;  // of the devices of the ends
  uint64_t capture_of(const std::vector<cuda::Stream>& streams) const;
  void order(const std::vector<cuda::Stream>& streams);

  const std::shared_ptr<GpuCalls> calls_;
  const std::vector<std::shared_ptr<cuda::SharedEvent>> ends_;
  const uint64_t capture_;
  const bool owned_;
  bool waited_ = false;
  std::mutex mutex_;
  PreparedCall prepared_;  // until the first wait()
};

}  // namespace pycollect
