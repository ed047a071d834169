// Everything that is asked of CUDA, at its driver's height: 26 calls. The real ones are
// torch/cuda/api.cpp; those of the tests need no GPU, and everything above this is tested on them
// as it runs. No CUDA headers: handles are opaque.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../plan/dtype.h"
#include "../shm/system.h"

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
struct KernelRow {
  std::vector<std::byte*> dsts, srcs;
  std::vector<std::ptrdiff_t> dst_pitches = {}, src_pitches = {};  // bytes from row to row
  std::size_t count = 0;                                           // elements of a row
  std::size_t rows = 1;
  bool finishes = false;  // `avg` scales here
};

// One kernel, or as few as the parameter limit allows: rows that touch nothing in common.
struct Launch {
  std::vector<KernelRow> rows;
  DType dtype;
  ReduceOp op;
  FoldOptions options;
  // A word that the device reads when it comes to this: if it is not zero then, nothing is written.
  const std::byte* guard = nullptr;
};

// A rectangle through a copy engine, between any two memories.
struct CopyRect {
  std::byte* dst;
  const std::byte* src;
  std::ptrdiff_t dst_pitch, src_pitch;
  std::size_t bytes, rows;
  Device dst_device, src_device;
};

// What a capture on any thread forbids the calls of this one that may synchronize: all of them, or
// only those on streams of its own captures. As CUDA's modes of these names.
enum class CaptureMode { global, thread_local_only };

// Memory of this process's that others may map, for as long as the descriptor is open.
struct Exported {
  shm::Descriptor descriptor;
  std::size_t bytes;  // whole pages of the device's
};

// From any thread. Each call throws std::runtime_error with CUDA's reason. What takes a stream or
// an event is called while its device is current.
class Api {
 public:
  virtual ~Api() = default;

  virtual Device current_device() = 0;
  virtual void set_device(Device device) = 0;
  // The same, to leave a thread as it was: begins nothing on a device that is not in use.
  virtual void restore_device(Device device) = 0;
  virtual std::string identity(Device device) = 0;  // the same in all processes that see it
  virtual CaptureMode exchange_capture_mode(CaptureMode mode) = 0;  // of this thread; the former

  virtual Stream create_stream(Device device) = 0;
  virtual void destroy(Stream stream) = 0;
  virtual bool is_capturing(Stream stream) = 0;
  virtual void synchronize(Stream stream) = 0;  // the host waits; never during a capture

  virtual Event create_event(Device device) = 0;  // without timing
  virtual void destroy(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool query(Event event) = 0;        // is what was recorded last done?
  virtual void synchronize(Event event) = 0;  // the host waits for that

  // Behind what is on the stream. The first launch of a kernel may load it, and so wait for all
  // streams of the process.
  virtual void launch(Stream stream, const Launch& launch) = 0;
  virtual void copy(Stream stream, const CopyRect& rectangle) = 0;
  virtual void fill(Stream stream, std::byte* memory, unsigned char value, std::size_t bytes) = 0;
  // `word` is of memory that the device knows. The wait ends when the word has reached the value,
  // cyclically: shm::reached says how.
  virtual void write_value(Stream stream, std::byte* word, uint64_t value) = 0;
  virtual void wait_value(Stream stream, std::byte* word, uint64_t value) = 0;

  // These, and those below, may wait for all streams of the process.
  virtual std::byte* allocate(Device device, std::size_t bytes) = 0;  // that can be exported
  virtual Exported export_memory(std::byte* memory) = 0;
  virtual std::byte* map(Device device, const shm::Descriptor& memory, std::size_t bytes) = 0;
  // What was allocated or mapped. Memory is gone when nobody maps it and no descriptor is open.
  virtual void unmap(std::byte* memory) = 0;

  // Whole pages of the host's memory; returns where the current device finds them.
  virtual std::byte* register_host(std::byte* memory, std::size_t bytes) = 0;
  virtual void unregister_host(std::byte* memory) = 0;
};

}  // namespace pycollect::cuda
