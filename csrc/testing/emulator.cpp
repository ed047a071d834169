// Streams and events of the emulator (emulator.h). Recording an event takes a snapshot of the
// stream's clock.
#include "emulator.h"

#include <algorithm>

#include "../plan/error.h"

namespace pycollect::cuda {
namespace {

void join(std::vector<int>& mine, const std::vector<int>& seen) {
  if (mine.size() < seen.size()) mine.resize(seen.size());
  for (std::size_t i = 0; i < seen.size(); ++i) mine[i] = std::max(mine[i], seen[i]);
}

bool covers(const std::vector<int>& mine, const std::vector<int>& seen) {
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (seen[i] > (i < mine.size() ? mine[i] : 0)) return false;
  return true;
}

}  // namespace

Stream Emulator::create_stream(Device device) {
  enter("create_stream");
  const Lock lock = locked();
  ++counters_["streams"];
  return create_stream_of(Owner::none, device);
}

Stream Emulator::create_stream_of(Owner owner, Device device) {
  const Lock lock = locked();
  demand(is_device(device), "no device ", device);
  const std::size_t number = streams_.add();
  states_.push_back({{device, reinterpret_cast<void*>(number + 1)}, owner});  // only compared
  trace_.streams = static_cast<int>(states_.size());
  return states_.back().stream;
}

std::size_t Emulator::number(Stream stream) const {
  const auto found = std::find_if(states_.begin(), states_.end(),
                                  [&](const StreamState& s) { return s.stream == stream; });
  demand(found != states_.end(), "the stream does not exist");
  return found - states_.begin();
}

Emulator::StreamState& Emulator::state(Stream stream, const char* call) {
  demand(stream.device == thread_device(), call, " on a stream of device ", stream.device,
         " while device ", thread_device(), " is current");
  StreamState& found = states_[number(stream)];
  demand(records_ || found.capture == 0, call, " while the stream is capturing");
  return found;
}

Emulator::EventState& Emulator::state(Event event, const char* call) {
  const auto i = reinterpret_cast<std::size_t>(event.handle);
  demand(i >= 1 && i <= events_.size() && events_[i - 1].alive, call,
         " of an event that does not exist");
  return events_[i - 1];
}

void Emulator::log(const char* call, const StreamState& stream) {
  if (!records_) calls_.push_back(text(call, stream.owner == Owner::caller ? " caller" : " group"));
}

Event Emulator::create_event(Device device) {
  const Lock lock = locked();
  enter("create_event");
  demand(device == thread_device(), "an event for device ", device, " while device ",
         thread_device(), " is current");
  events_.push_back({device});
  ++counters_["events"];
  return {device, reinterpret_cast<void*>(events_.size())};
}

void Emulator::destroy(Event event) noexcept {
  const Lock lock = locked();
  events_[reinterpret_cast<std::size_t>(event.handle) - 1].alive = false;
  --counters_["events"];
}

void Emulator::record(Event event, Stream stream) {
  const Lock lock = locked();
  enter("record");
  StreamState& s = state(stream, "record");
  EventState& e = state(event, "record");
  demand(e.device == stream.device, "an event of device ", e.device,
         " recorded on a stream of device ", stream.device);
  const std::size_t at = number(stream);
  e.recorded = static_cast<int>(trace_.operations.size());
  e.is_recorded = true;
  e.point = streams_.end(at);
  e.capture = s.capture;
  e.clock = s.clock;
  e.queried = e.logged = false;
  log("record", s);
  if (records_)
    trace_.operations.push_back({.kind = Operation::Kind::record, .stream = static_cast<int>(at)});
}

void Emulator::wait(Stream stream, Event event) {
  Lock lock = locked();
  enter("wait");
  StreamState& s = state(stream, "wait");
  const EventState& e = state(event, "wait");
  log("wait", s);
  const std::size_t at = number(stream);
  if (!records_) {
    const bool drains = drains_waits_ && s.owner == Owner::caller;
    if (e.is_recorded)
      streams_.enqueue(at, [this, point = e.point] { return streams_.advance(point); });
    lock.unlock();
    if (drains) streams_.drain(at);
    return;
  }
  if (e.is_recorded) {
    demand(e.capture == 0 || e.capture == capture_,
           "wait for an event of a capture that has ended");
    demand(s.capture == 0 || e.capture == s.capture,
           "a capturing stream waits for work outside of its capture");
    s.capture = e.capture == 0 ? s.capture : e.capture;
    join(s.clock, e.clock);
  }
  trace_.operations.push_back({.kind = Operation::Kind::wait,
                               .stream = static_cast<int>(at),
                               .of = e.is_recorded ? e.recorded : Operation::kNone});
}

// The first query after a record returns false, because real devices take time. Unless a thread
// runs the streams, each later query runs one item of work: on the event's stream, or, if that is
// blocked, on every caller's stream.
bool Emulator::query(Event event) {
  Lock lock = locked();
  enter("query");
  require_no_capture("query");
  EventState& e = state(event, "query");
  demand(e.capture == 0, "query of an event that was recorded in a capture");
  if (!e.is_recorded) return true;
  return_late("query", lock, e.point);
  if (!lock.owns_lock()) lock.lock();
  if (!std::exchange(e.queried, true)) return false;
  if (!streams_.has_thread() && !streams_.passed(e.point) && !streams_.step(e.point.stream))
    for (std::size_t s = 0; s < states_.size(); ++s)
      if (states_[s].owner == Owner::caller) streams_.step(s);
  const bool done = streams_.passed(e.point);
  if (done && records_)
    trace_.operations.push_back({.kind = Operation::Kind::host_wait, .of = e.recorded});
  if (done && !std::exchange(e.logged, true)) log("done", states_[e.point.stream]);
  return done;
}

void Emulator::synchronize(Event event) {
  const Lock lock = locked();
  enter("synchronize");
  EventState& e = state(event, "synchronize");
  require_no_capture("synchronize");
  demand(e.capture == 0, "the host waits for an event that was recorded in a capture");
  if (e.is_recorded)
    trace_.operations.push_back({.kind = Operation::Kind::host_wait, .of = e.recorded});
}

void Emulator::synchronize(Stream stream) {
  const Lock lock = locked();
  enter("synchronize");
  require_no_capture("synchronize");
  demand(state(stream, "synchronize").capture == 0, "the host waits for a stream in a capture");
  trace_.operations.push_back(
      {.kind = Operation::Kind::host_wait, .stream = static_cast<int>(number(stream))});
}

uint64_t Emulator::capture_id(Stream stream) {
  const Lock lock = locked();
  ++counters_["capture_id"];
  demand(stream.device == thread_device(), "query of a stream of device ", stream.device,
         " while device ", thread_device(), " is current");
  return static_cast<uint64_t>(states_[number(stream)].capture);
}

void Emulator::at_graph_end(Stream stream, std::function<void()> destroyed) {
  const Lock lock = locked();
  enter("at_graph_end");
  const int capture = states_[number(stream)].capture;
  demand(capture != 0, "at_graph_end of a stream that is not capturing");
  at_graph_end_[capture].push_back(std::move(destroyed));
}

void Emulator::destroy_graph(int capture) {
  std::vector<std::function<void()>> destroyed;
  {
    const Lock lock = locked();
    destroyed.swap(at_graph_end_[capture]);
  }
  for (const auto& act : destroyed) act();
}

void Emulator::begin_capture(Stream stream) {
  const Lock lock = locked();
  demand(capture_ == 0, "two captures at once");
  demand(stream.handle != nullptr, "the default stream cannot be captured");
  states_[number(stream)].capture = capture_ = ++captures_;
}

int Emulator::end_capture(Stream stream) {
  const Lock lock = locked();
  const StreamState& origin = states_[number(stream)];
  demand(capture_ != 0 && origin.capture == capture_, "this stream began no capture");
  for (const StreamState& s : states_)
    demand(s.capture != capture_ || covers(origin.clock, s.clock), "a stream of device ",
           s.stream.device, " has work in the capture that was not joined");
  for (StreamState& s : states_)
    if (s.capture == capture_) s.capture = 0;
  return std::exchange(capture_, 0);
}

}  // namespace pycollect::cuda
