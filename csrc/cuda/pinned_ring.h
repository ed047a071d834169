// Pageable host memory, which no GPU should touch, passes through a ring of pinned pieces of ours:
// the CPU's threads fill one while others are in flight, and empty those that have arrived. Made
// once and used again; an event guards every piece against being filled too soon.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "current_device.h"

namespace pycollect::cuda {

// What is asked of the host: memory that devices reach, and copies by its threads.
class Host {
 public:
  virtual ~Host() = default;
  virtual std::byte* new_pinned(std::size_t bytes) = 0;  // for ever: rings never shrink
  virtual void copy(const CopyRect& rectangle) = 0;      // done when it returns
};

// Giving a piece to a stream costs the host some 5 us, and a link of 55 GB/s carries 2 MiB in 38:
// larger pieces would save little, and fill and drain the pipeline more slowly. One is filled and
// one in flight each way; with four, neither side waits for the other's every hitch. (From data
// sheets: no GPU has measured it.)
struct PinnedRingSize {
  std::size_t piece_bytes = 2 << 20;
  int pieces = 4;
};

class PinnedRing {
 public:
  PinnedRing(Api& api, Host& host, PinnedRingSize size);
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // A copy with pageable memory on its one or its other side.
  void copy(CurrentDevice& device, Stream stream, const CopyRect& rectangle);

  // From pageable memory into pageable memory: the host's own.
  void copy_on_host(CurrentDevice& device, const CopyRect& rectangle);

  // A launch of one row; `is_pageable` says which of its pointers are, destinations first.
  void launch(CurrentDevice& device, Stream stream, const Launch& launch,
              const std::vector<bool>& is_pageable);

  // Returns when all that is to be in pageable memory is there. What was read of it has been when
  // the calls above return.
  void drain(CurrentDevice& device);

  void forget(CurrentDevice& device) noexcept;  // after a failure: nothing more is to arrive

 private:
  enum class State { idle, open, closed };  // closed: its event is behind everything in it
  struct PinnedPiece {
    std::byte* base;
    State state = State::idle;
    Stream stream = {};
    std::size_t used = 0;
    std::map<Device, Event> events = {};
    std::vector<CopyRect> leaving = {};  // for the host to move on, when the stream is done
  };

  std::byte* room(CurrentDevice& device, Stream stream, std::size_t bytes);
  void close(CurrentDevice& device);
  void finish(CurrentDevice& device, PinnedPiece& piece);
  void settle(CurrentDevice& device, const CopyRect& rectangle, bool reads);

  Api& api_;
  Host& host_;
  const PinnedRingSize size_;
  std::vector<PinnedPiece> pieces_;
  std::size_t at_ = 0;  // the latest
};

// Rings for as many runs as there are at a time.
class PinnedRings {
 public:
  PinnedRings(Api& api, Host& host, PinnedRingSize size) : api_(api), host_(host), size_(size) {}
  std::unique_ptr<PinnedRing> take();
  void give_back(std::unique_ptr<PinnedRing> ring);

 private:
  Api& api_;
  Host& host_;
  const PinnedRingSize size_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<PinnedRing>> idle_;
};

// The ring of one run, taken when the first thing needs it.
class StagingSession {
 public:
  StagingSession(PinnedRings& rings, CurrentDevice& device) : rings_(rings), device_(device) {}
  ~StagingSession();
  StagingSession(const StagingSession&) = delete;
  StagingSession& operator=(const StagingSession&) = delete;

  // All of these leave the stream's device current.
  void copy(Stream stream, const CopyRect& rectangle) { ring().copy(device_, stream, rectangle); }
  void copy_on_host(Stream stream, const CopyRect& rectangle) {
    ring().copy_on_host(device_, rectangle);
    device_.use(stream.device);
  }
  void launch(Stream stream, const Launch& launch, const std::vector<bool>& is_pageable) {
    ring().launch(device_, stream, launch, is_pageable);
  }
  void drain() {
    if (ring_ != nullptr) ring_->drain(device_);
  }

 private:
  PinnedRing& ring() {
    if (ring_ == nullptr) ring_ = rings_.take();
    return *ring_;
  }

  PinnedRings& rings_;
  CurrentDevice& device_;
  std::unique_ptr<PinnedRing> ring_;
};

}  // namespace pycollect::cuda
