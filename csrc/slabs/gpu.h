// Everything that ranks which are processes ask of CUDA, call by call. The real one is
// torch/cuda/ipc_gpu.cpp; the tests have one in which processes share host memory and streams are
// lists, so what is tested without a GPU is what runs. No CUDA headers: handles are opaque.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "../cuda/runtime.h"
#include "../shm/outlet.h"

namespace pycollect::slabs {

using cuda::Device;
using cuda::Event;
using cuda::Launch;
using cuda::Stream;

// With which another process opens memory: where it fetches a descriptor of it, and how much that
// is.
struct Handle {
  shm::Outlet::Ticket ticket = {};
  uint64_t bytes = 0;
};

// CUDA gives memory to other processes in such pages: what shares one with something else gives
// that away as well.
inline constexpr std::size_t kGranule = 2 << 20;
constexpr std::size_t whole_granules(std::size_t bytes) {
  return (bytes + kGranule - 1) / kGranule * kGranule;
}

// Each call throws std::runtime_error with CUDA's reason. From any thread, whatever device is
// current and whatever other threads capture.
class Gpu {
 public:
  virtual ~Gpu() = default;

  // What was allocated goes to other processes as a file descriptor, which they fetch from this
  // process's outlet.
  Handle handle_of(Device device, std::byte* memory);
  std::byte* open(Device device, const Handle& handle);  // of another process; once
  void free(Device device, std::byte* memory);

  virtual std::string identity(Device device) = 0;  // the same in all processes that see it

  virtual std::byte* allocate(Device device, std::size_t bytes) = 0;  // an allocation by itself
  // Has whoever allocates tensors give back what it keeps for those to come. Not from within that.
  virtual void make_room(Device device) = 0;
  virtual void close(Device device, std::byte* opened) = 0;

  // Whole pages of the host's memory; returns where the device finds them.
  virtual std::byte* adopt(Device device, std::byte* memory, std::size_t bytes) = 0;
  virtual void forsake(Device device, std::byte* memory) = 0;

  virtual Stream new_stream(Device device) = 0;
  virtual void destroy(Stream stream) = 0;
  virtual Event record(Stream stream) = 0;  // a new one
  virtual bool reached(Event event) = 0;
  virtual void destroy(Event event) = 0;

  // Behind what is on the stream. `word` is of memory that the device knows. The wait ends when the
  // word has reached the value, cyclically: shm::reached says how.
  virtual void write(Stream stream, std::byte* word, uint64_t value) = 0;
  virtual void await(Stream stream, std::byte* word, uint64_t value) = 0;
  virtual void launch(Stream stream, const Launch& launch) = 0;
  virtual void fill(Stream stream, std::byte* memory, unsigned char value, std::size_t bytes) = 0;
  virtual void read(Stream stream, void* host, const std::byte* memory, std::size_t bytes) = 0;

 protected:
  struct Exported {
    shm::Descriptor descriptor;
    std::size_t bytes;
  };
  virtual Exported exported(Device device, std::byte* memory) = 0;
  virtual std::byte* map(Device device, const shm::Descriptor& memory, std::size_t bytes) = 0;
  virtual void release(Device device, std::byte* memory) = 0;

 private:
  std::mutex mutex_;
  std::optional<shm::Outlet> outlet_;  // from the first handle on
  std::map<std::byte*, Handle> offered_;
};

}  // namespace pycollect::slabs
