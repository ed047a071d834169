// Self-test of exported memory and counters on one rank: small launches and waits on a separate
// stream, each with a time limit.
#pragma once
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "staging_buffer.h"

namespace pycollect::cuda_ipc {

// Each call throws an error that names what failed, and has a time limit whatever the device does.
class SelfTest {
 public:
  SelfTest(std::shared_ptr<CudaIpcMemory> gpu, const StagingBuffer& staging_buffer,
           const SignalPad& signal_pad, std::byte* registered);
  ~SelfTest();
  SelfTest(const SelfTest&) = delete;
  SelfTest& operator=(const SelfTest&) = delete;

  void clear();          // resets this rank's patterns, before its staging buffer is published
  void write_to_all();   // writes a pattern into every rank's staging buffer
  void read_from_all();  // checks each rank's own pattern, and the one it wrote into this buffer
  // Blocks the streams of all ranks but rank 0, with a launch behind the wait. All collectives need
  // that rank 0 runs kernels and signals meanwhile, as `signal_all` does. (A GPU that ranks share
  // could be kept by a stream that waits.)
  void block_streams();
  void signal_all();    // signals on the stream, after a launch
  void wait_for_all();  // waits on the stream for all signals, and for one from the host
  // Ends the device's work, however the calls went and whatever the stream waits for; returns false
  // if it does not end. To be called once no rank reads the counters any more.
  bool drain() noexcept;

 private:
  using Patterns = std::vector<std::byte>;  // host copy of the patterns in this rank's buffer
  // Calls act(api), which enqueues work on the stream, with the device current.
  template <class F>
  void on_stream(F&& act) {
    gpu_->on(stream_.device, std::forward<F>(act));
  }
  void copy(std::byte* dst, std::byte* src);
  void begin_enqueue(std::function<void(cuda::Api&)> act);
  void end_enqueue();
  void finish();
  void release() const noexcept;
  std::byte* word(Rank r) const { return registered_ + signal_pad_.offset(r); }

  const std::shared_ptr<CudaIpcMemory> gpu_;
  const StagingBuffer& staging_buffer_;
  const SignalPad signal_pad_;
  std::byte* const registered_;
  const Stream stream_;
  std::unique_ptr<Patterns> found_;
  std::thread enqueuer_;
  std::future<void> enqueued_;  // the end of its work
  bool stuck_ = false;          // the work on the stream has not ended
};

}  // namespace pycollect::cuda_ipc
