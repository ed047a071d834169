// How many threads are in calls that may wait. When the groups end with the interpreter these wake
// with an error, and must get the interpreter's lock while there is one: up to Python 3.13 a thread
// that comes later is ended by unwinding its stack, which C++ answers with SIGABRT.
#pragma once
#include <atomic>

namespace pycollect::dist {

class UnderWay {
 public:
  UnderWay() { ++count_; }
  ~UnderWay() { --count_; }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

  static bool any() { return count_ != 0; }

 private:
  static inline std::atomic<int> count_{0};
};

}  // namespace pycollect::dist
