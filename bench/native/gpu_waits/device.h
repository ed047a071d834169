// Interface of the wait probe to a GPU. cuda.cu implements it on CUDA, tests/native/
// gpu_waits_threads.cpp with threads. A process has one device, made after the fork.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace gpu_waits {

using Word = uint64_t;
using Handle = std::array<std::byte, 64>;  // the size of CUDA IPC memory and event handles
using Stream = void*;
using Event = void*;

struct NoDevice : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Device {
 public:
  virtual ~Device() = default;

  // Returns zeroed device memory.
  virtual Word* allocate(std::size_t words) = 0;
  // Returns the handle with which another process opens allocated memory.
  virtual Handle share(Word* at) = 0;
  virtual Word* open(const Handle& handle) = 0;
  // Pins host memory, and returns its device address.
  virtual Word* pin(void* host, std::size_t bytes) = 0;

  virtual Stream new_stream() = 0;
  virtual void synchronize(Stream stream) = 0;
  virtual bool is_done(Stream stream) = 0;

  virtual Event new_event(Handle& handle) = 0;
  virtual Event open_event(const Handle& handle) = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait_event(Stream stream, Event event) = 0;

  // Stream memory operations. All earlier work of the stream is visible to a reader of the written
  // value.
  virtual void write(Stream stream, Word* at, Word value) = 0;
  virtual void wait(Stream stream, Word* at, Word least) = 0;

  virtual void copy(Stream stream, void* to, const void* from, std::size_t bytes) = 0;

  // Kernels over `count` words: `fill` sets all to a value, `sum` sets each of several arrays to
  // their sum, and `compare` adds the number of words other than `wanted` to `*wrong`.
  virtual void copy_by_kernel(Stream stream, Word* to, const Word* from, std::size_t count) = 0;
  virtual void fill(Stream stream, Word* words, std::size_t count, Word value) = 0;
  virtual void sum(Stream stream, const std::vector<Word*>& of, std::size_t count) = 0;
  virtual void compare(Stream stream, const Word* words, std::size_t count, Word wanted,
                       Word* wrong) = 0;
};

// Called before the fork. Must not use CUDA, because its state does not survive a fork.
void prepare();
// Returns the device of this process. Throws NoDevice with the reason if there is none.
std::unique_ptr<Device> make_device();

}  // namespace gpu_waits
