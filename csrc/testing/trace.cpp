// Memory is divided into cells at every address where an access begins or ends, so an access covers
// a cell entirely or not at all. Per cell, as in analysis/races.cpp, the last write and the reads
// since are enough: an access ordered after them is also after all earlier accesses.
#include "trace.h"

#include <algorithm>
#include <random>

#include "../plan/error.h"

namespace pycollect {
namespace {

using TraceClock = std::vector<int>;

void join(TraceClock& mine, const TraceClock& seen) {
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = std::max(mine[i], seen[i]);
}

struct TraceAccess {
  int actor = Operation::kNone, count = 0, operation = 0, part = 0;
};
struct TraceCell {
  TraceAccess writer = {};
  std::vector<TraceAccess> readers = {};  // since the writer
};

}  // namespace

TraceRaceDetector::TraceRaceDetector(const Trace& trace)
    : trace_(trace), spans_(trace.operations.size()) {
  for (const Operation& o : trace.operations)
    for (const MemoryAccess& t : o.accesses) {
      bounds_.push_back(t.begin);
      bounds_.push_back(t.begin + t.bytes);
    }
  std::sort(bounds_.begin(), bounds_.end());
  bounds_.erase(std::unique(bounds_.begin(), bounds_.end()), bounds_.end());
  auto cell = [&](const std::byte* p) {
    return static_cast<int>(std::lower_bound(bounds_.begin(), bounds_.end(), p) - bounds_.begin());
  };
  for (std::size_t i = 0; i < spans_.size(); ++i) {
    for (const MemoryAccess& t : trace.operations[i].accesses)
      spans_[i].push_back({cell(t.begin), cell(t.begin + t.bytes), t.part, t.writes});
    // Reads first: an operation reads an element before it writes it.
    std::stable_sort(spans_[i].begin(), spans_[i].end(),
                     [](const CellRange& a, const CellRange& b) { return a.writes < b.writes; });
    if (is_for_event(trace.operations[i])) waits_.push_back(static_cast<int>(i));
  }
}

class TraceRaceDetector::TraceReplay {
 public:
  explicit TraceReplay(const TraceRaceDetector& detector)
      : detector_(detector),
        host_(detector.trace_.streams),
        clocks_(host_ + 1, TraceClock(host_ + 1)),
        recorded_(detector.spans_.size()),
        cells_(detector.bounds_.size()) {}

  std::string run(int dropped) {
    for (int i = 0; i < static_cast<int>(detector_.spans_.size()) && race_.empty(); ++i)
      if (i != dropped) step(i);
    return race_;
  }

 private:
  void step(int i) {
    const Operation& o = detector_.trace_.operations[i];
    TraceClock& host = clocks_[host_];
    if (o.kind == Operation::Kind::host_work) return access(i, host_);
    if (o.kind == Operation::Kind::host_wait && o.of != Operation::kNone)
      return join(host, recorded_[o.of]);
    TraceClock& clock = clocks_[o.stream];
    if (o.kind == Operation::Kind::host_wait) return join(host, clock);
    join(clock, host);
    if (o.kind == Operation::Kind::record) recorded_[i] = clock;
    if (o.kind == Operation::Kind::wait && o.of != Operation::kNone) join(clock, recorded_[o.of]);
    if (o.kind == Operation::Kind::work) access(i, o.stream);
  }

  void access(int i, int actor) {
    TraceClock& clock = clocks_[actor];
    const int count = clock[actor] + 1;
    for (const CellRange& s : detector_.spans_[i])
      for (int c = s.first; c < s.last; ++c) {
        const TraceAccess self{actor, count, i, s.part};
        TraceCell& cell = cells_[c];
        ordered(cell.writer, self, clock);
        if (!s.writes) {
          cell.readers.push_back(self);
          continue;
        }
        for (const TraceAccess& reader : cell.readers) ordered(reader, self, clock);
        cell.writer = self;
        cell.readers.clear();
      }
    clock[actor] = count;
  }

  void ordered(const TraceAccess& a, const TraceAccess& self, const TraceClock& clock) {
    if (a.actor == Operation::kNone || clock[a.actor] >= a.count) return;
    if (a.operation == self.operation && a.part == self.part) return;
    const auto& all = detector_.trace_.operations;
    race_ = text(all[a.operation].what, " (operation ", a.operation, ") and ",
                 all[self.operation].what, " (operation ", self.operation,
                 ") access the same memory, one of them writes, and nothing orders them");
  }

  const TraceRaceDetector& detector_;
  int host_;
  std::vector<TraceClock> clocks_;    // [actor]: each stream, then the host
  std::vector<TraceClock> recorded_;  // [operation]: the stream's clock at a record
  std::vector<TraceCell> cells_;
  std::string race_;
};

std::string TraceRaceDetector::race(int dropped) const {
  return TraceReplay(*this).run(dropped == Operation::kNone ? dropped : waits_.at(dropped));
}

namespace {

class Shuffling {
 public:
  Shuffling(const Trace& trace, uint64_t seed)
      : trace_(trace),
        random_(seed),
        queues_(trace.streams),
        next_(trace.streams, 0),
        done_(trace.operations.size()) {
    for (int i = 0; i < static_cast<int>(trace.operations.size()); ++i) {
      const Operation& o = trace.operations[i];
      const bool by_host =
          o.kind == Operation::Kind::host_work || o.kind == Operation::Kind::host_wait;
      (by_host ? host_ : queues_[o.stream]).push_back(i);
    }
  }

  void run() {
    for (std::size_t left = done_.size(); left > 0; --left) {
      std::vector<int> ready;
      const int issued = host_done_ < host_.size() ? host_[host_done_]
                                                   : static_cast<int>(trace_.operations.size());
      for (int s = 0; s < trace_.streams; ++s)
        if (next_[s] < queues_[s].size() && can_run(queues_[s][next_[s]], issued))
          ready.push_back(queues_[s][next_[s]]);
      if (host_done_ < host_.size() && host_can_run(host_[host_done_]))
        ready.push_back(host_[host_done_]);
      require(!ready.empty(), "deadlock: operations wait for each other");
      finish(ready[random_() % ready.size()]);
    }
  }

 private:
  bool can_run(int i, int issued) const {
    const Operation& o = trace_.operations[i];
    return i < issued &&
           (o.kind != Operation::Kind::wait || o.of == Operation::kNone || done_[o.of]);
  }
  bool host_can_run(int i) const {
    const Operation& o = trace_.operations[i];
    if (o.kind == Operation::Kind::host_work) return true;
    if (o.of != Operation::kNone) return done_[o.of];
    const std::vector<int>& queue = queues_[o.stream];
    return next_[o.stream] == queue.size() || queue[next_[o.stream]] > i;
  }

  void finish(int i) {
    const Operation& o = trace_.operations[i];
    std::vector<std::size_t> order(o.parts.size());
    for (std::size_t p = 0; p < order.size(); ++p) order[p] = p;
    std::shuffle(order.begin(), order.end(), random_);
    for (std::size_t p : order) o.parts[p]();
    done_[i] = true;
    const bool by_host =
        o.kind == Operation::Kind::host_work || o.kind == Operation::Kind::host_wait;
    ++(by_host ? host_done_ : next_[o.stream]);
  }

  const Trace& trace_;
  std::mt19937_64 random_;
  std::vector<std::vector<int>> queues_;  // [stream]
  std::vector<std::size_t> next_;         // [stream]
  std::vector<int> host_;                 // operations of the host
  std::size_t host_done_ = 0;             // number of them that are done
  std::vector<bool> done_;                // [operation]
};

}  // namespace

void run_as_issued(const Trace& trace) {
  for (const Operation& o : trace.operations)
    for (const auto& part : o.parts) part();
}

void run_shuffled(const Trace& trace, uint64_t seed) { Shuffling(trace, seed).run(); }

}  // namespace pycollect
