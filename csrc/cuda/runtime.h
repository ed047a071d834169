// Everything that the executor asks of CUDA: eleven calls. The real one is runtime.cu; csrc/sim has
// one that only remembers what happens before what, and fails where CUDA would, so the executor
// that is tested without a GPU is the one that runs. No CUDA headers: handles are opaque.
#pragma once
#include <cstddef>
#include <vector>

#include "../plan/dtype.h"

namespace pycollect::cuda {

using Device = int;                  // CUDA's ordinal
inline constexpr Device kHost = -1;  // a rank whose tensors are in host memory

struct Stream {
  Device device = kHost;
  void* handle = nullptr;  // null is the device's default stream
  bool operator==(const Stream&) const = default;
};
struct Event {
  Device device = kHost;
  void* handle = nullptr;
};

// One step on the memory of one tensor, all of its rows: dst[i] = srcs[0][i] op srcs[1][i] op ...
struct Row {
  std::vector<std::byte*> dsts, srcs;
  std::vector<std::ptrdiff_t> dst_pitches = {}, src_pitches = {};  // bytes from row to row
  std::size_t count = 0;                                           // elements of a row
  std::size_t rows = 1;
  bool finishes = false;  // `avg` scales here
};

// One kernel, or as few as the parameter limit allows: rows that touch nothing in common.
struct Launch {
  std::vector<Row> rows;
  DType dtype;
  ReduceOp op;
  FoldOptions options;
  // A word that the device reads when it comes to this: if it is not zero then, nothing is written.
  const std::byte* guard = nullptr;
};

// A rectangle through a copy engine, between any two memories.
struct Rectangle {
  std::byte* dst;
  const std::byte* src;
  std::ptrdiff_t dst_pitch, src_pitch;
  std::size_t bytes, rows;
  Device dst_device, src_device;
};

class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual Device current_device() = 0;
  virtual void set_device(Device device) = 0;
  virtual Event create_event(Device device) = 0;  // without timing; the device must be current
  virtual void destroy_event(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual void launch(Stream stream, const Launch& launch) = 0;
  virtual void copy(Stream stream, const Rectangle& rectangle) = 0;
  virtual bool is_capturing(Stream stream) = 0;
  virtual void synchronize(Stream stream) = 0;  // the host waits; never during a capture
  virtual void synchronize(Event event) = 0;    // the same, for what was recorded last
};

// The real one. Throws RuntimeError where CUDA does not work.
Runtime& cuda_runtime();

}  // namespace pycollect::cuda
