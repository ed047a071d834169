// The interface to CUDA: 17 functions, each as low-level as a call of CUDA. It is implemented with
// CUDA in torch/cuda/api.cpp, and without a GPU by the emulator in csrc/testing; all code above the
// interface runs unchanged on either. Includes no CUDA headers: handles are opaque.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../plan/dtype.h"

namespace pycollect::cuda {

using Device = int;                  // CUDA's device ordinal
inline constexpr Device kHost = -1;  // stands for host memory where a device is expected

struct Stream {
  Device device = kHost;
  void* handle = nullptr;  // null: the device's default stream
  bool operator==(const Stream&) const = default;
};
struct Event {
  Device device = kHost;
  void* handle = nullptr;
};

// One fold, or one copy if there is one source, that a kernel executes on the memory of one tensor.
// In each of `rows` rows of `count` elements, every dst[i] = srcs[0][i] op srcs[1][i] op ...
struct KernelTask {
  std::vector<std::byte*> dsts, srcs;  // addresses of the first row
  // Bytes from one row to the next, for each address. Kernels ignore them for a single row.
  std::vector<std::ptrdiff_t> dst_pitches = {}, src_pitches = {};
  std::size_t count = 0;
  std::size_t rows = 1;
  bool finishes = false;  // true: the fold completes the reduction, and `avg` divides
};

// Kernel tasks that may run at the same time, because their accesses do not conflict. One kernel
// executes the folds and one the copies, or more if they exceed the limit of kernel parameters.
struct Launch {
  std::vector<KernelTask> tasks;
  DType dtype;
  ReduceOp op;
  FoldOptions options;
};

// A copy of `rows` rows of `bytes` bytes, between the memories of any two devices, or of a device
// and the host, or within one of them. The next row is `dst_pitch` or `src_pitch` bytes on.
struct CopyRect {
  std::byte* dst;
  const std::byte* src;
  std::ptrdiff_t dst_pitch, src_pitch;
  std::size_t bytes, rows;
  Device dst_device, src_device;
};

// Capture mode of a thread, as in CUDA. On a thread in mode `global`, calls that may synchronize
// are forbidden while any thread captures in that mode; on one in mode `thread_local_only`, they
// are forbidden while the thread itself captures; on one in mode `relaxed`, only those are that
// concern a stream or an event of a capture.
enum class CaptureMode { global, thread_local_only, relaxed };

// Thread-safe. A function that fails throws std::runtime_error with CUDA's reason. The device of a
// stream or event that is passed must be current, except to destroy an event.
class Api {
 public:
  virtual ~Api() = default;

  virtual Device current_device() = 0;
  virtual void set_device(Device device) = 0;
  // Makes the thread's former device current again, without creating a context on that device.
  virtual void restore_device(Device device) = 0;
  // Sets the thread's capture mode, and returns the former one.
  virtual CaptureMode exchange_capture_mode(CaptureMode mode) = 0;

  virtual Stream create_stream(Device device) = 0;  // of the highest priority
  // Returns the number of the capture that the stream is in; 0: none.
  virtual uint64_t capture_id(Stream stream) = 0;
  // Calls `destroyed` once, on any thread, when the graph that captures this stream and all its
  // executable graphs are destroyed. `destroyed` must not call CUDA.
  virtual void at_graph_end(Stream stream, std::function<void()> destroyed) = 0;
  // Blocks the host until all work on the stream is done. Forbidden during a capture.
  virtual void synchronize(Stream stream) = 0;

  virtual Event create_event(Device device) = 0;  // with timing disabled
  virtual void destroy(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;  // enqueues a wait for the last record
  // Returns whether the work before the event's last record is done.
  virtual bool query(Event event) = 0;
  virtual void synchronize(Event event) = 0;  // blocks the host until that work is done

  // Loads the kernels of launches with this type and op on any device, unless they are loaded. May
  // wait for all streams of the process, as the first launch of a kernel that is not loaded does.
  // Unlike that launch, it is permitted whatever any thread captures.
  virtual void load(Device device, DType dtype, ReduceOp op) = 0;
  // These two functions enqueue work on the stream.
  virtual void launch(Stream stream, const Launch& launch) = 0;
  virtual void copy(Stream stream, const CopyRect& rectangle) = 0;
};

}  // namespace pycollect::cuda
