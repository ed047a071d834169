// Trace of the work enqueued on streams, in issue order: checked for races by happens-before on the
// addresses that it touches, and run in any order that streams and events allow. No CUDA.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace pycollect {

struct Touch {
  const std::byte* begin;
  std::size_t bytes;
  bool writes;
  int part;  // of its operation; parts are not ordered with each other
};

struct Operation {
  enum class Kind { work, record, wait, host_work, host_wait };
  Kind kind;
  int stream = 0;    // unused by the host's own work
  int of = kNobody;  // index of the record that a wait is for. kNobody: a stream's wait passes at
                     // once, and the host's wait is for the whole stream
  std::string what = {};
  std::vector<Touch> touches = {};
  std::vector<std::function<void()>> parts = {};  // its effects, executed in any order
  static constexpr int kNobody = -1;
};

// Returns true for a wait, of a stream or of the host, for one record.
inline bool is_for_event(const Operation& o) {
  return o.kind == Operation::Kind::wait ||
         (o.kind == Operation::Kind::host_wait && o.of != Operation::kNobody);
}

struct Trace {
  int streams = 0;
  std::vector<Operation> operations = {};
};

// Finds races with vector clocks. Every stream is an actor with a clock, and so is the host: it
// issues all operations, so its earlier work and waits precede whatever it issues next.
class StreamJudge {
 public:
  explicit StreamJudge(const Trace& trace);

  int waits() const {
    return static_cast<int>(waits_.size());
  }  // number of waits for events, by streams and the host
  // Describes the first race; empty when there is none. `dropped`: the wait to leave out.
  std::string race(int dropped = Operation::kNobody) const;

 private:
  struct CellRange {
    int first, last, part;  // cells [first, last)
    bool writes;
  };
  class Replaying;

  const Trace& trace_;
  std::vector<const std::byte*> bounds_;       // of cells: no access begins or ends inside a cell
  std::vector<std::vector<CellRange>> spans_;  // [operation]
  std::vector<int> waits_;                     // indices of the operations that wait for an event
};

// Run all operations: as issued, or in a random order that streams and events allow.
void run_as_issued(const Trace& trace);
void run_shuffled(const Trace& trace, uint64_t seed);

}  // namespace pycollect
