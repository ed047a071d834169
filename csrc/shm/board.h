// Where processes that want to share memory find each other before they do: keys and values that
// every rank of a group can write and read. csrc/torch puts a torch Store behind it, tests a map.
#pragma once
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace pycollect::shm {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// `timeout` from now. A hundred years stand for all that is longer: a clock counts nanoseconds in
// 64 bits, and both this sum and the ones that other clocks make of it must fit.
inline Deadline deadline_after(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kNone{0}, kLongest = std::chrono::hours(24 * 365 * 100);
  return Clock::now() + std::clamp(timeout, kNone, kLongest);
}

class Board {
 public:
  virtual ~Board() = default;
  virtual void post(const std::string& key, const std::string& value) = 0;
  // Waits until somebody has posted it. Throws Timeout.
  virtual std::string read(const std::string& key, Deadline deadline) = 0;
  // All of them, in this order: for a board that can do it in one access.
  virtual std::vector<std::string> read_all(const std::vector<std::string>& keys,
                                            Deadline deadline) {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(read(key, deadline));
    return values;
  }
};

}  // namespace pycollect::shm
