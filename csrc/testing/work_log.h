// Log of the work of streams and of the host, in the order in which it was issued, and a check for
// races: conflicting accesses to the same addresses of which neither happens before the other.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace pycollect {

struct MemoryAccess {
  const std::byte* begin;
  std::size_t bytes;
  bool writes;
  int part;  // of its operation; the parts of an operation are unordered
};

struct Operation {
  enum class Kind { work, record, wait, host_work, host_wait };
  Kind kind;
  int stream = 0;  // unused for host_work
  // Index of the record that a wait is for. kNone: a stream's wait does nothing, and the host waits
  // for the whole stream.
  int of = kNone;
  std::string what = {};
  std::vector<MemoryAccess> accesses = {};
  static constexpr int kNone = -1;
};

// Returns whether the operation is a wait, of a stream or of the host, for an event.
inline bool is_for_event(const Operation& o) {
  return o.kind == Operation::Kind::wait ||
         (o.kind == Operation::Kind::host_wait && o.of != Operation::kNone);
}

struct WorkLog {
  int streams = 0;
  std::vector<Operation> operations = {};
};

// Finds races with vector clocks. Every stream and the host have a clock. The host issues all
// operations, so its work and its waits precede all operations that it issues later.
class RaceDetector {
 public:
  explicit RaceDetector(const WorkLog& log);

  // Number of waits for events, of streams and of the host.
  int waits() const { return static_cast<int>(waits_.size()); }
  // Returns a description of the first race, or "". `dropped`: number of a wait to leave out.
  std::string race(int dropped = Operation::kNone) const;

 private:
  struct CellRange {
    int first, last, part;  // cells [first, last)
    bool writes;
  };
  class LogReplay;

  const WorkLog& log_;
  std::vector<const std::byte*> bounds_;       // boundaries of the cells
  std::vector<std::vector<CellRange>> spans_;  // [operation]
  std::vector<int> waits_;                     // operations that wait for an event
};

}  // namespace pycollect
