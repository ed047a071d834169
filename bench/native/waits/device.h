// What the probe of waits asks of a GPU: cuda.cu answers with one, tests/native/waits_threads.cpp
// with threads. A process has one device, made after the fork.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace waits {

using Word = uint64_t;
using Handle = std::array<std::byte, 64>;  // as large as CUDA's of memory and of events
using Stream = void*;
using Event = void*;

struct NoDevice : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Device {
 public:
  virtual ~Device() = default;

  // Zeroed memory of the device, which another process opens by the handle.
  virtual Word* allocate(std::size_t words, Handle& handle) = 0;
  virtual Word* open(const Handle& handle) = 0;
  // Pins memory of the host; returns its address for streams.
  virtual Word* pin(void* host, std::size_t bytes) = 0;

  virtual Stream new_stream() = 0;
  virtual void synchronize(Stream stream) = 0;
  virtual bool is_done(Stream stream) = 0;

  virtual Event new_event(Handle& handle) = 0;
  virtual Event open_event(const Handle& handle) = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void hold(Stream stream, Event event) = 0;

  // Stream memory operations: what was on the stream before is visible to whoever sees the value.
  virtual void write(Stream stream, Word* at, Word value) = 0;
  virtual void wait(Stream stream, Word* at, Word least) = 0;

  virtual void copy(Stream stream, void* to, const void* from, std::size_t bytes) = 0;

  // Kernels over `count` words: a value into all, the sum of several into each, and the number of
  // those that are not as wanted added to `*wrong`.
  virtual void fill(Stream stream, Word* words, std::size_t count, Word value) = 0;
  virtual void sum(Stream stream, const std::vector<Word*>& of, std::size_t count) = 0;
  virtual void compare(Stream stream, const Word* words, std::size_t count, Word wanted,
                       Word* wrong) = 0;
};

// Before the fork, which nothing of CUDA survives.
void prepare();
// Throws NoDevice with a sentence that says why there is none.
std::unique_ptr<Device> make_device();

}  // namespace waits
