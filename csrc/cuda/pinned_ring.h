// Copies to and from pageable host memory, which no GPU should access, through a ring of pinned
// pieces: the CPU's threads fill one piece while others are in flight, and empty those that have
// arrived. Rings are reused; an event per piece prevents filling it too soon.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device_guard.h"

namespace pycollect::cuda {

// Enqueueing the copy of a piece costs the host about 5 us, and a link of 55 GB/s transfers 2 MiB
// in 38 us: larger pieces would save little, and fill and drain the pipeline more slowly. In each
// direction one piece is filled while one is in flight, and four pieces hide short delays of either
// side. (From data sheets; not measured on a GPU.)
struct PinnedRingSize {
  std::size_t piece_bytes = 2 << 20;
  int pieces = 4;
};

// Operations of the host: allocating memory that devices can access, and copies by its threads.
class HostMemoryOps {
 public:
  virtual ~HostMemoryOps() = default;
  virtual std::byte* new_pinned(std::size_t bytes) = 0;  // never freed: rings are kept
  virtual void copy(const CopyRect& rectangle) = 0;      // done when it returns
  virtual PinnedRingSize ring_size() const { return {}; }
};

class PinnedRing {
 public:
  PinnedRing(Api& api, HostMemoryOps& host);
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // Copies from pageable memory to a device, or from a device to pageable memory.
  void copy(DeviceGuard& device, Stream stream, const CopyRect& rectangle);

  // Copies from pageable to pageable memory on the host.
  void copy_on_host(DeviceGuard& device, const CopyRect& rectangle);

  // Launches one kernel task. `is_pageable`: [pointer], destinations first.
  void launch(DeviceGuard& device, Stream stream, const Launch& launch,
              const std::vector<bool>& is_pageable);

  // Waits until all results in pageable memory are complete. Pageable sources have already been
  // read when the calls above return.
  void drain(DeviceGuard& device);

  // Drops all outstanding copies to pageable memory, after a failure.
  void discard(DeviceGuard& device) noexcept;

 private:
  enum class PieceState { idle, open, closed };  // closed: its event is recorded after its work
  struct PinnedPiece {
    std::byte* base;
    PieceState state = PieceState::idle;
    Stream stream = {};
    std::size_t used = 0;
    std::map<Device, Event> events = {};
    std::vector<CopyRect> host_copies = {};  // to pageable memory, once the stream's work is done
  };

  std::byte* reserve(DeviceGuard& device, Stream stream, std::size_t bytes);
  void close(DeviceGuard& device);
  void finish(DeviceGuard& device, PinnedPiece& piece);
  void drain_if_overlapping(DeviceGuard& device, const CopyRect& rectangle, bool reads);

  Api& api_;
  HostMemoryOps& host_;
  const PinnedRingSize size_;
  std::vector<PinnedPiece> pieces_;
  std::size_t at_ = 0;  // index of the latest piece
};

// Pool of rings. Each run in progress has a ring of its own.
class PinnedRingPool {
 public:
  PinnedRingPool(Api& api, HostMemoryOps& host) : api_(api), host_(host) {}
  std::unique_ptr<PinnedRing> take();
  void give_back(std::unique_ptr<PinnedRing> ring);

 private:
  Api& api_;
  HostMemoryOps& host_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<PinnedRing>> idle_;
};

// The ring of one run, taken from the pool at first use.
class PinnedRingLease {
 public:
  PinnedRingLease(PinnedRingPool& rings, DeviceGuard& device) : rings_(rings), device_(device) {}
  ~PinnedRingLease();
  PinnedRingLease(const PinnedRingLease&) = delete;
  PinnedRingLease& operator=(const PinnedRingLease&) = delete;

  // These calls leave the stream's device current, except `drain`.
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

  PinnedRingPool& rings_;
  DeviceGuard& device_;
  std::unique_ptr<PinnedRing> ring_;
};

}  // namespace pycollect::cuda
