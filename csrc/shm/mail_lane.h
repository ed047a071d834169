// A lane: a buffer of the receiver's that one large message at a time goes through, as a stream of
// bytes: the sender fills it while the receiver empties it. Two counters that only grow, and go on
// from one message to the next.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pycollect::shm {

struct LaneCounters {
  alignas(128) std::atomic<uint64_t> filled{0};
  alignas(128) std::atomic<uint64_t> emptied{0};
};
static_assert(sizeof(LaneCounters) == 256);

// Half of it is filled while the other half is emptied. In the second-level cache of a core (1 MiB
// and more) both fit beside what is copied from and to.
inline constexpr std::size_t kMostLaneBytes = 256 << 10;

struct LanePlace {
  LaneCounters* counters;
  std::byte* data;
  std::size_t bytes;  // whole cache lines
};

// One end of a message on its way through a lane. `at` is this end's counter; it is always a whole
// number of cache lines, so that no copy begins in the middle of one.
class Flow {
 public:
  Flow(const LanePlace& lane, uint64_t begin, uint64_t bytes)
      : lane_(lane), at_(begin), left_(bytes), piece_(piece_for(bytes, lane.bytes)) {}

  bool done() const { return left_ == 0; }
  uint64_t left() const { return left_; }  // bytes that have not been moved
  std::size_t lane_bytes() const { return lane_.bytes; }

  // Copies into the lane what there is room for of so many bytes that are `there`, a piece at the
  // most, and whole cache lines before the message's end; returns whether it was any.
  bool fill(const std::byte*& from, uint64_t there) {
    const uint64_t emptied = lane_.counters->emptied.load(std::memory_order_seq_cst);
    if (there < left_) there = there / kUnit * kUnit;
    const std::size_t n = step(std::min(there, lane_.bytes - (at_ - emptied)));
    if (n == 0) return false;
    std::memcpy(lane_.data + at_ % lane_.bytes, from, n);
    from += n;
    lane_.counters->filled.store(pass(n), std::memory_order_seq_cst);  // see Bell
    return true;
  }
  // The same out of it.
  bool empty(std::byte*& into) {
    const uint64_t filled = lane_.counters->filled.load(std::memory_order_seq_cst);
    const std::size_t n = step(filled - at_);
    if (n == 0) return false;
    std::memcpy(into, lane_.data + at_ % lane_.bytes, n);
    into += n;
    lane_.counters->emptied.store(pass(n), std::memory_order_seq_cst);
    return true;
  }

 private:
  static constexpr std::size_t kUnit = 64;
  static constexpr std::size_t whole_lines(std::size_t bytes) {
    return (bytes + kUnit - 1) / kUnit * kUnit;
  }
  // So small that the two ends are at work at the same time from early on, so large that the
  // counters' way between the cores (0.15 us) is little beside the copy.
  static std::size_t piece_for(uint64_t bytes, std::size_t lane_bytes) {
    constexpr std::size_t kLeast = 4 << 10, kPerLane = 4;
    return std::clamp<std::size_t>(whole_lines(bytes / 8), kLeast, lane_bytes / kPerLane);
  }
  std::size_t step(uint64_t available) const {
    const std::size_t to_end = lane_.bytes - at_ % lane_.bytes;
    return std::min(
        {static_cast<std::size_t>(left_), static_cast<std::size_t>(available), to_end, piece_});
  }
  uint64_t pass(std::size_t n) {
    left_ -= n;
    return at_ += whole_lines(n);
  }

  LanePlace lane_;
  uint64_t at_, left_;
  std::size_t piece_;
};

}  // namespace pycollect::shm
