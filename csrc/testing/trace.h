// What was put on streams, in the order in which it was: judged by happens-before on the addresses
// it touches, and run in any order that streams and events allow. No CUDA.
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
  int part;  // of its operation: parts know nothing of each other
};

struct Operation {
  enum class Kind { work, record, wait, host_work, host_wait };
  Kind kind;
  int stream = 0;    // the host's own work has none
  int of = kNobody;  // the record that a wait is for; nobody's: it passes through, or, for the
                     // host's, the whole stream is waited for
  std::string what = {};
  std::vector<Touch> touches = {};
  std::vector<std::function<void()>> parts = {};  // what it does, in any order
  static constexpr int kNobody = -1;
};

// A wait of a stream, or of the host, that is for one record.
inline bool is_for_event(const Operation& o) {
  return o.kind == Operation::Kind::wait ||
         (o.kind == Operation::Kind::host_wait && o.of != Operation::kNobody);
}

struct Trace {
  int streams = 0;
  std::vector<Operation> operations = {};
};

// Every stream is an actor with a clock, and so is the host: it issues all operations, so what it
// has done or waited for comes before what it issues next.
class StreamJudge {
 public:
  explicit StreamJudge(const Trace& trace);

  int waits() const {
    return static_cast<int>(waits_.size());
  }  // of streams and the host, for events
  // The first race, in words; empty when there is none. `dropped`: without this wait.
  std::string race(int dropped = Operation::kNobody) const;

 private:
  struct Span {
    int first, last, part;  // cells [first, last)
    bool writes;
  };
  class Replaying;

  const Trace& trace_;
  std::vector<const std::byte*> bounds_;  // of cells: nothing begins or ends inside of one
  std::vector<std::vector<Span>> spans_;  // [operation]
  std::vector<int> waits_;                // operations
};

// Runs everything: as issued, or, with a seed, in a random order that streams and events allow.
void run_as_issued(const Trace& trace);
void run_shuffled(const Trace& trace, uint64_t seed);

}  // namespace pycollect
