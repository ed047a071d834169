// Where processes that want to share memory find each other before they do: keys and values that
// every rank of a group can write and read. csrc/torch puts a torch Store behind it, tests a map.
#pragma once
#include <chrono>
#include <string>

namespace pycollect::shm {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

class Board {
 public:
  virtual ~Board() = default;
  virtual void post(const std::string& key, const std::string& value) = 0;
  // Waits until somebody has posted it. Throws Timeout.
  virtual std::string read(const std::string& key, Deadline deadline) = 0;
};

}  // namespace pycollect::shm
