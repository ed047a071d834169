// The interface to CUDA: 26 calls, as low-level as the driver's. torch/cuda/api.cpp implements them
// with CUDA, an emulator (csrc/testing) without a GPU; all code above this interface runs unchanged
// on either. No CUDA headers: handles are opaque.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../group/system.h"
#include "../plan/dtype.h"

namespace pycollect::cuda {

using Device = int;                  // CUDA's device ordinal
inline constexpr Device kHost = -1;  // for a rank whose tensors are in host memory

struct Stream {
  Device device = kHost;
  void* handle = nullptr;  // null: the device's default stream
  bool operator==(const Stream&) const = default;
};
struct Event {
  Device device = kHost;
  void* handle = nullptr;
};

// One fold or copy for a kernel to execute, on the memory of one tensor: in each line,
// dst[i] = srcs[0][i] op srcs[1][i] op ... for every dst.
struct KernelWork {
  std::vector<std::byte*> dsts, srcs;
  std::vector<std::ptrdiff_t> dst_pitches = {}, src_pitches = {};  // bytes from line to line
  std::size_t count = 0;                                           // elements of a line
  std::size_t lines = 1;
  bool finishes = false;  // the last fold of a reduction, where `avg` scales
};

// Works without conflicting accesses, for one kernel, or as few kernels as the limit of kernel
// parameters allows.
struct Launch {
  std::vector<KernelWork> works;
  DType dtype;
  ReduceOp op;
  FoldOptions options;
  // A word that the device reads when the launch runs: if it is nonzero then, the launch writes
  // nothing. Null: no guard.
  const std::byte* guard = nullptr;
};

// A rectangle that a copy engine copies, between the memories of any two devices or the host.
struct CopyRect {
  std::byte* dst;
  const std::byte* src;
  std::ptrdiff_t dst_pitch, src_pitch;
  std::size_t bytes, rows;
  Device dst_device, src_device;
};

// Capture mode of a thread, as in CUDA: calls that may synchronize are forbidden on this thread
// during a global capture of any thread, or only during a capture of its own.
enum class CaptureMode { global, thread_local_only };

// Exported memory of this process, which others may map while the descriptor is open.
struct Exported {
  ipc::UniqueFd descriptor;
  std::size_t bytes;  // whole pages of the device
};

// Thread-safe. Each call throws std::runtime_error with CUDA's reason. For a call that takes a
// stream or an event, its device must be current.
class Api {
 public:
  virtual ~Api() = default;

  virtual Device current_device() = 0;
  virtual void set_device(Device device) = 0;
  // Makes a thread's former device current again, and creates no context if that device has none.
  virtual void restore_device(Device device) = 0;
  virtual std::string identity(Device device) = 0;                  // the same in all processes
  virtual CaptureMode exchange_capture_mode(CaptureMode mode) = 0;  // returns the former

  virtual Stream create_stream(Device device) = 0;
  virtual void destroy(Stream stream) = 0;
  virtual bool is_capturing(Stream stream) = 0;
  virtual void synchronize(Stream stream) = 0;  // blocks the host; not during a capture

  virtual Event create_event(Device device) = 0;  // without timing
  virtual void destroy(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool query(Event event) = 0;        // true: the work before the last record is done
  virtual void synchronize(Event event) = 0;  // blocks the host until then

  // Enqueued on the stream. The first launch of a kernel may load it, and then wait for all streams
  // of the process.
  virtual void launch(Stream stream, const Launch& launch) = 0;
  virtual void copy(Stream stream, const CopyRect& rectangle) = 0;
  virtual void fill(Stream stream, std::byte* memory, unsigned char value, std::size_t bytes) = 0;
  // `word` is in memory that the device can access. The wait ends when the word has reached the
  // value, compared with wrap-around as by ipc::reached.
  virtual void write_value(Stream stream, std::byte* word, uint64_t value) = 0;
  virtual void wait_value(Stream stream, std::byte* word, uint64_t value) = 0;

  // All calls from here on may wait for all streams of the process.
  virtual std::byte* allocate(Device device, std::size_t bytes) = 0;  // memory that can be exported
  virtual Exported export_memory(std::byte* memory) = 0;
  virtual std::byte* map(Device device, const ipc::UniqueFd& memory, std::size_t bytes) = 0;
  // Unmaps allocated or mapped memory, which is freed when no process has it mapped and no
  // descriptor of it is open.
  virtual void unmap(std::byte* memory) = 0;

  // Registers whole pages of host memory; returns their address on the current device.
  virtual std::byte* register_host(std::byte* memory, std::size_t bytes) = 0;
  virtual void unregister_host(std::byte* memory) = 0;
};

}  // namespace pycollect::cuda
