// Memory is divided into cells at every address where an access begins or ends, so an access covers
// a cell entirely or not at all. Per cell, as in analysis/races.cpp, the last write and the reads
// since are enough: an access ordered after them is also after all earlier accesses.
#include "work_log.h"

#include <algorithm>

#include "../plan/error.h"

namespace pycollect {
namespace {

using LogClock = std::vector<int>;

void join(LogClock& mine, const LogClock& seen) {
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = std::max(mine[i], seen[i]);
}

struct LogAccess {
  int actor = Operation::kNone, count = 0, operation = 0, part = 0;
};
struct LogCell {
  LogAccess writer = {};
  std::vector<LogAccess> readers = {};  // since the writer
};

}  // namespace

RaceDetector::RaceDetector(const WorkLog& log) : log_(log), spans_(log.operations.size()) {
  for (const Operation& o : log.operations)
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
    for (const MemoryAccess& t : log.operations[i].accesses)
      spans_[i].push_back({cell(t.begin), cell(t.begin + t.bytes), t.part, t.writes});
    // Reads first: an operation reads an element before it writes it.
    std::stable_sort(spans_[i].begin(), spans_[i].end(),
                     [](const CellRange& a, const CellRange& b) { return a.writes < b.writes; });
    if (is_for_event(log.operations[i])) waits_.push_back(static_cast<int>(i));
  }
}

class RaceDetector::LogReplay {
 public:
  explicit LogReplay(const RaceDetector& detector)
      : detector_(detector),
        host_(detector.log_.streams),
        clocks_(host_ + 1, LogClock(host_ + 1)),
        recorded_(detector.spans_.size()),
        cells_(detector.bounds_.size()) {}

  std::string run(int dropped) {
    for (int i = 0; i < static_cast<int>(detector_.spans_.size()) && race_.empty(); ++i)
      if (i != dropped) step(i);
    return race_;
  }

 private:
  void step(int i) {
    const Operation& o = detector_.log_.operations[i];
    LogClock& host = clocks_[host_];
    if (o.kind == Operation::Kind::host_work) return access(i, host_);
    if (o.kind == Operation::Kind::host_wait && o.of != Operation::kNone)
      return join(host, recorded_[o.of]);
    LogClock& clock = clocks_[o.stream];
    if (o.kind == Operation::Kind::host_wait) return join(host, clock);
    join(clock, host);
    if (o.kind == Operation::Kind::record) recorded_[i] = clock;
    if (o.kind == Operation::Kind::wait && o.of != Operation::kNone) join(clock, recorded_[o.of]);
    if (o.kind == Operation::Kind::work) access(i, o.stream);
  }

  void access(int i, int actor) {
    LogClock& clock = clocks_[actor];
    const int count = clock[actor] + 1;
    for (const CellRange& s : detector_.spans_[i])
      for (int c = s.first; c < s.last; ++c) {
        const LogAccess self{actor, count, i, s.part};
        LogCell& cell = cells_[c];
        ordered(cell.writer, self, clock);
        if (!s.writes) {
          cell.readers.push_back(self);
          continue;
        }
        for (const LogAccess& reader : cell.readers) ordered(reader, self, clock);
        cell.writer = self;
        cell.readers.clear();
      }
    clock[actor] = count;
  }

  void ordered(const LogAccess& a, const LogAccess& self, const LogClock& clock) {
    if (a.actor == Operation::kNone || clock[a.actor] >= a.count) return;
    if (a.operation == self.operation && a.part == self.part) return;
    const auto& all = detector_.log_.operations;
    race_ = text(all[a.operation].what, " (operation ", a.operation, ") and ",
                 all[self.operation].what, " (operation ", self.operation,
                 ") access the same memory, one of them writes, and nothing orders them");
  }

  const RaceDetector& detector_;
  int host_;
  std::vector<LogClock> clocks_;    // [actor]: each stream, then the host
  std::vector<LogClock> recorded_;  // [operation]: the stream's clock at a record
  std::vector<LogCell> cells_;
  std::string race_;
};

std::string RaceDetector::race(int dropped) const {
  return LogReplay(*this).run(dropped == Operation::kNone ? dropped : waits_.at(dropped));
}

}  // namespace pycollect
