// Bootstrap store: keys and values that every rank of a group can write and read before the ranks
// share memory. csrc/torch implements it with a torch Store, tests with files.
#pragma once
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace pycollect::ipc {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Returns the timeout, or 0 or 100 years. Clocks count nanoseconds in 64 bits, and neither a sum of
// a time and a timeout nor its conversion to another clock may overflow.
inline std::chrono::milliseconds clamped(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kNone{0}, kLongest = std::chrono::hours(24 * 365 * 100);
  return std::clamp(timeout, kNone, kLongest);
}

inline Deadline deadline_after(std::chrono::milliseconds timeout) {
  return Clock::now() + clamped(timeout);
}

class Store {
 public:
  virtual ~Store() = default;
  virtual void post(const std::string& key, const std::string& value) = 0;
  // Waits until ranks have posted all keys, and returns their values. Throws Timeout.
  virtual std::vector<std::string> read_all(const std::vector<std::string>& keys,
                                            Deadline deadline) = 0;
  std::string read(const std::string& key, Deadline deadline) {
    return read_all({key}, deadline)[0];
  }
};

}  // namespace pycollect::ipc
