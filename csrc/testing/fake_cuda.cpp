// See fake_cuda.h. An event is a snapshot of its stream's clock; work that a launch would do is
// kept as a function on real bytes, done with the host's folds.
#include "fake_cuda.h"

#include <algorithm>
#include <stdexcept>

#include "../plan/error.h"
#include "by_hand.h"

namespace pycollect::cuda {
namespace {

using Kind = Operation::Kind;

template <class... Parts>
void demand(bool ok, const Parts&... why) {
  if (!ok) throw std::runtime_error(text("cuda: ", why...));
}

void join(std::vector<int>& mine, const std::vector<int>& seen) {
  if (mine.size() < seen.size()) mine.resize(seen.size());
  for (std::size_t i = 0; i < seen.size(); ++i) mine[i] = std::max(mine[i], seen[i]);
}

bool is_behind(const std::vector<int>& mine, const std::vector<int>& seen) {
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (seen[i] > (i < mine.size() ? mine[i] : 0)) return false;
  return true;
}

}  // namespace

FakeCuda::FakeCuda(int devices) : peers_(devices, std::vector<bool>(devices)) {
  demand(devices >= 1, "no device");
  for (int d = 0; d < devices; ++d) streams_.push_back({{d, nullptr}});  // the default ones
  trace_.streams = devices;
}

Stream FakeCuda::make_stream(Device device) {
  demand(device >= 0 && device < static_cast<int>(peers_.size()), "no device ", device);
  streams_.push_back({{device, reinterpret_cast<void*>(streams_.size() + 1)}});  // only compared
  trace_.streams = static_cast<int>(streams_.size());
  return streams_.back().stream;
}

std::byte* FakeCuda::allocate(MemoryKind kind, Device device, std::size_t bytes) {
  demand(capture_ == 0, "allocation during a capture");
  auto storage = std::make_unique<std::byte[]>(bytes + 1);  // no two regions touch
  std::byte* const base = storage.get();
  const Device at = kind == MemoryKind::device ? device : kHost;
  regions_[base] = {bytes, kind, at, std::move(storage)};
  return base;
}

void FakeCuda::set_device(Device device) {
  demand(device >= 0 && device < static_cast<int>(peers_.size()), "no device ", device);
  current_ = device;
}

void FakeCuda::may_fail() {
  if (fail_in_ >= 0) demand(fail_in_-- != 0, "out of memory");
}

int FakeCuda::number(Stream stream) const {
  const auto found = std::find_if(streams_.begin(), streams_.end(),
                                  [&](const StreamState& s) { return s.stream == stream; });
  demand(found != streams_.end(), "no such stream");
  return static_cast<int>(found - streams_.begin());
}

FakeCuda::StreamState& FakeCuda::state(Stream stream, const char* call) {
  demand(stream.device == current_, call, " on a stream of device ", stream.device,
         " while device ", current_, " is current");
  return streams_[number(stream)];
}

FakeCuda::EventState& FakeCuda::state(Event event, const char* call) {
  const auto i = reinterpret_cast<std::size_t>(event.handle);
  demand(i >= 1 && i <= events_.size() && events_[i - 1].alive, call, " of no event");
  return events_[i - 1];
}

Event FakeCuda::create_event(Device device) {
  may_fail();
  demand(device == current_, "an event for device ", device, " while device ", current_,
         " is current");
  events_.push_back({device});
  ++counts_.events;
  ++counts_.alive;
  return {device, reinterpret_cast<void*>(events_.size())};
}

void FakeCuda::destroy_event(Event event) noexcept {
  events_[reinterpret_cast<std::size_t>(event.handle) - 1].alive = false;
  --counts_.alive;
}

void FakeCuda::record(Event event, Stream stream) {
  may_fail();
  StreamState& s = state(stream, "record");
  EventState& e = state(event, "record");
  demand(e.device == stream.device, "an event of device ", e.device,
         " recorded on a stream of device ", stream.device);
  demand(e.call != call_, "an event recorded again while others may still have to wait for it");
  e.recorded = static_cast<int>(trace_.operations.size());
  e.capture = s.capture;
  e.call = call_;
  e.clock = s.clock;
  trace_.operations.push_back({.kind = Kind::record, .stream = number(stream)});
  ++counts_.records;
}

void FakeCuda::wait(Stream stream, Event event) {
  may_fail();
  StreamState& s = state(stream, "wait");
  const EventState& e = state(event, "wait");
  ++counts_.waits;
  if (e.recorded != Operation::kNobody) {
    demand(e.capture == 0 || e.capture == capture_,
           "wait for an event of a capture that has ended");
    demand(s.capture == 0 || e.capture == s.capture,
           "a stream under capture waits for work outside of it");
    s.capture = e.capture == 0 ? s.capture : e.capture;
    join(s.clock, e.clock);
  }
  trace_.operations.push_back({.kind = Kind::wait, .stream = number(stream), .of = e.recorded});
}

Operation& FakeCuda::work(Stream stream, std::string what) {
  StreamState& s = streams_[number(stream)];
  demand(capture_ == 0 || s.capture != 0, what, " escapes the capture: its stream has not joined");
  const std::size_t n = number(stream);
  if (s.clock.size() <= n) s.clock.resize(n + 1);
  ++s.clock[n];
  trace_.operations.push_back(
      {.kind = Kind::work, .stream = static_cast<int>(n), .what = std::move(what)});
  return trace_.operations.back();
}

const FakeCuda::Region& FakeCuda::region(const std::byte* begin, std::size_t bytes) const {
  auto after = regions_.upper_bound(begin);
  demand(after != regions_.begin(), "an address in no memory");
  const auto& [base, r] = *std::prev(after);
  demand(begin + bytes <= base + r.bytes, "an access beyond the end of its memory");
  return r;
}

void FakeCuda::reachable(Device device, const std::byte* begin, std::size_t bytes) const {
  const Region& r = region(begin, bytes);
  demand(r.kind != MemoryKind::pageable, "a kernel touches pageable memory");
  demand(r.kind == MemoryKind::pinned || r.device == device || peers_[device][r.device], "device ",
         device, " cannot touch the memory of device ", r.device);
}

std::vector<Touch> FakeCuda::touches(Device device, const Row& row, std::size_t item,
                                     int part) const {
  demand(row.count > 0 && row.rows > 0 && !row.dsts.empty() && !row.srcs.empty(),
         "a row of nothing");
  demand(row.dsts.size() == row.dst_pitches.size() && row.srcs.size() == row.src_pitches.size(),
         "a row without a pitch for each pointer");
  std::vector<Touch> all;
  auto side = [&](const std::vector<std::byte*>& at, const std::vector<std::ptrdiff_t>& pitches,
                  bool writes) {
    for (std::size_t i = 0; i < at.size(); ++i)
      for (std::size_t r = 0; r < row.rows; ++r) {
        const std::byte* begin = at[i] + pitches[i] * static_cast<std::ptrdiff_t>(r);
        reachable(device, begin, row.count * item);
        all.push_back({begin, row.count * item, writes, part});
      }
  };
  side(row.srcs, row.src_pitches, false);
  side(row.dsts, row.dst_pitches, true);
  for (const Touch& a : all)
    for (const Touch& b : all)
      demand(!b.writes || a.begin == b.begin || a.begin + a.bytes <= b.begin ||
                 b.begin + b.bytes <= a.begin,
             "a row whose destination overlaps another of its slices without being it");
  return all;
}

void FakeCuda::launch(Stream stream, const Launch& launch) {
  may_fail();
  state(stream, "launch");
  demand(!launch.rows.empty(), "a launch of nothing");
  Operation& o = work(stream, text("a launch on stream ", number(stream)));
  const auto how = std::make_shared<const Launch>(launch);
  for (std::size_t i = 0; i < how->rows.size(); ++i) {
    const Row& row = how->rows[i];
    for (const Touch& t : touches(stream.device, row, item_bytes(how->dtype), static_cast<int>(i)))
      o.touches.push_back(t);
    o.parts.push_back([how, &row] { fold(row, *how); });
  }
  ++counts_.launches;
  counts_.rows += static_cast<int>(launch.rows.size());
}

void FakeCuda::copy(Stream stream, const Rectangle& it) {
  may_fail();
  state(stream, "copy");
  demand(it.bytes > 0 && it.rows > 0, "a copy of nothing");
  Operation& o = work(stream, text("a copy on stream ", number(stream)));
  o.touches = touches(it);
  for (const Touch& t : o.touches)
    demand(region(t.begin, t.bytes).kind != MemoryKind::pageable || capture_ == 0,
           "a copy of pageable memory during a capture");
  demand(it.src_device == kHost || it.dst_device == kHost || it.src_device == it.dst_device ||
             peers_[it.src_device][it.dst_device] || peers_[it.dst_device][it.src_device],
         "a copy between devices ", it.src_device, " and ", it.dst_device,
         ", which do not reach each other");
  o.parts.push_back([it] { move(it); });
  ++counts_.copies;
}

std::vector<Touch> FakeCuda::touches(const Rectangle& it) const {
  std::vector<Touch> all;
  for (std::size_t r = 0; r < it.rows; ++r) {
    const auto row = static_cast<std::ptrdiff_t>(r);
    for (bool writes : {false, true}) {
      const std::byte* at = writes ? it.dst + it.dst_pitch * row : it.src + it.src_pitch * row;
      demand(region(at, it.bytes).device == (writes ? it.dst_device : it.src_device),
             "a copy names another memory than its address is in");
      all.push_back({at, it.bytes, writes, 0});
    }
  }
  return all;
}

std::byte* FakeCuda::new_pinned(std::size_t bytes) {
  may_fail();
  return allocate(MemoryKind::pinned, kHost, bytes);
}

void FakeCuda::copy(const Rectangle& it) {
  demand(it.bytes > 0 && it.rows > 0, "the host copies nothing");
  demand(capture_ == 0, "the host copies during a capture");
  host("a copy by the host", touches(it), [it] { move(it); });
  ++counts_.host_copies;
}

bool FakeCuda::is_capturing(Stream stream) { return state(stream, "query").capture != 0; }

void FakeCuda::synchronize(Stream stream) {
  state(stream, "synchronization");
  demand(capture_ == 0, "the host waits during a capture");
  trace_.operations.push_back({.kind = Kind::host_wait, .stream = number(stream)});
  ++counts_.synchronizations;
}

void FakeCuda::synchronize(Event event) {
  may_fail();
  EventState& e = state(event, "synchronization");
  demand(capture_ == 0, "the host waits during a capture");
  e.call = -1;  // nobody can be waiting for it any more
  if (e.recorded != Operation::kNobody)
    trace_.operations.push_back({.kind = Kind::host_wait, .of = e.recorded});
  ++counts_.synchronizations;
}

void FakeCuda::begin_capture(Stream stream) {
  demand(capture_ == 0, "two captures at once");
  demand(stream.handle != nullptr, "the default stream cannot be captured");
  streams_[number(stream)].capture = capture_ = ++captures_;
}

void FakeCuda::end_capture(Stream stream) {
  const StreamState& origin = streams_[number(stream)];
  demand(capture_ != 0 && origin.capture == capture_, "this stream began no capture");
  for (const StreamState& s : streams_)
    demand(s.capture != capture_ || is_behind(origin.clock, s.clock), "a stream of device ",
           s.stream.device, " has work in the capture that was not joined");
  for (StreamState& s : streams_) s.capture = 0;
  capture_ = 0;
}

void FakeCuda::somebody(Stream stream, std::string what, std::vector<Touch> touches,
                        std::function<void()> act) {
  Operation& o = work(stream, std::move(what));
  o.touches = std::move(touches);
  o.parts.push_back(std::move(act));
}

void FakeCuda::host(std::string what, std::vector<Touch> touches, std::function<void()> act) {
  Operation o{.kind = Kind::host_work, .what = std::move(what), .touches = std::move(touches)};
  o.parts.push_back(std::move(act));
  trace_.operations.push_back(std::move(o));
}

void FakeCuda::drop_wait(int number) {
  for (Operation& o : trace_.operations)
    if (is_for_event(o) && number-- == 0)
      o = {.kind = o.kind == Kind::wait ? Kind::wait : Kind::host_work, .stream = o.stream};
}

void FakeCuda::forget_trace() {
  trace_.operations.clear();
  for (EventState& e : events_) e.recorded = Operation::kNobody;
}

}  // namespace pycollect::cuda
