// Devices, streams, events and captures of the emulator (emulator.h). Recording an event takes a
// snapshot of the stream's clock.
#include "emulator.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "../cuda/device_guard.h"

namespace pycollect::cuda {
namespace {

// Time limit for draining the streams: a longer drain counts as a deadlock.
constexpr std::chrono::seconds kLongestDrain(30);

struct ThreadState {
  std::uint64_t emulator = 0;  // its number
  Device device = 0;
  std::optional<Device> reported = {};  // by current_device(), in place of `device`
  CaptureMode mode = CaptureMode::global;
};

// Returns the calling thread's state for this emulator. Only the state for the last emulator is
// kept: a thread that switches to another one starts with a new state.
ThreadState& thread_state(std::uint64_t emulator) {
  static thread_local ThreadState mine;
  if (mine.emulator != emulator) mine = {emulator};
  return mine;
}

std::atomic<std::uint64_t> emulators = 0;  // number of emulators made so far

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

Emulator::Emulator(int devices, bool stands_in)
    : number_(++emulators),
      stands_in_(stands_in),
      drains_waits_(stands_in),
      allows_eager_work_(stands_in) {
  demand(devices >= 1, "an emulator needs at least one device");
  peers_.assign(devices, std::vector<bool>(devices));
  for (Device d = 0; d < devices; ++d) {  // default streams
    streams_.add(false);
    states_.push_back({{d, nullptr}, false});
  }
  log_.streams = devices;
}

EmulatedStreams::Lock Emulator::locked() const {
  return Lock(const_cast<EmulatedStreams&>(streams_).mutex);
}

// --- calls --------------------------------------------------------------------------------------

bool Emulator::enter(const char* call, const char* also) {
  const Lock lock = locked();
  ++counters_[call];
  if (!fault_ || !(fault_->call.empty() || fault_->call == call || fault_->call == also))
    return true;
  if (fault_->kind == FaultKind::slow) {
    std::this_thread::sleep_for(std::chrono::duration<double>(fault_->seconds));
    return true;
  }
  if (!is_due()) return true;
  demand(fault_->kind == FaultKind::skip, "injected failure in ", call);
  return false;
}

bool Emulator::is_due() {
  if (fault_->after < 0) return true;
  if (fault_->after-- > 0) return false;
  if (fault_->kind == FaultKind::lost)
    fault_ = Fault{FaultKind::fail, "", -1};
  else
    fault_->after = std::numeric_limits<int>::max();  // it has happened
  return true;
}

bool Emulator::skips(const char* call) {
  const Lock lock = locked();
  return fault_ && fault_->kind == FaultKind::skip && fault_->call == call && is_due();
}

void Emulator::require_no_capture(const char* call) const {
  demand(capture_ == 0 || thread_state(number_).mode == CaptureMode::relaxed, call,
         " is not permitted while a stream is capturing");
}

void Emulator::inject(std::optional<Fault> fault) {
  const Lock lock = locked();
  static const std::set<std::string> kWithoutResult{"wait",    "record", "synchronize",
                                                    "launch",  "copy",   "copy_",
                                                    "compute", "load",   "record_stream"};
  demand(!fault || fault->kind != FaultKind::skip || kWithoutResult.contains(fault->call),
         "only a call without a result can be left out");
  fault_ = std::move(fault);
}

void Emulator::drain_waits(bool on) {
  const Lock lock = locked();
  drains_waits_ = on;
}

std::map<std::string, int> Emulator::counters() const {
  const Lock lock = locked();
  return counters_;
}

std::string Emulator::race() const {
  const Lock lock = locked();
  return RaceDetector(log_).race();
}

std::pair<int, std::vector<int>> Emulator::redundant_waits() const {
  const Lock lock = locked();
  const RaceDetector detector(log_);
  std::vector<int> found;
  for (int i = 0; i < detector.waits(); ++i)
    if (detector.race(i).empty()) found.push_back(i);
  return {detector.waits(), found};
}

std::vector<std::string> Emulator::violations() {
  const Lock lock = locked();
  const std::string found = race();
  if (!found.empty() &&
      std::find(violations_.begin(), violations_.end(), found) == violations_.end())
    violations_.push_back(found);
  if (streams_.is_idle()) clear_log();
  return violations_;
}

std::vector<std::string> Emulator::calls() const {
  const Lock lock = locked();
  return calls_;
}

void Emulator::log_call(const char* call, const StreamState& stream) {
  calls_.push_back(text(call, stream.of_caller ? " caller" : " group"));
}

void Emulator::clear_log() {
  const Lock lock = locked();
  log_start_ += static_cast<int>(log_.operations.size());
  log_.operations.clear();
}

// --- devices ------------------------------------------------------------------------------------

bool Emulator::is_device(Device device) const {
  return device >= 0 && device < static_cast<int>(peers_.size());
}

Device Emulator::thread_device() const { return thread_state(number_).device; }

Device Emulator::current_device() {
  const Lock lock = locked();
  ++counters_["current_device"];
  const ThreadState& mine = thread_state(number_);
  return mine.reported.value_or(mine.device);
}

void Emulator::set_device(Device device) {
  demand(is_device(device), "no device ", device);
  ThreadState& mine = thread_state(number_);
  mine.device = device;
  mine.reported.reset();
}

void Emulator::report_device(Device device) { thread_state(number_).reported = device; }

CaptureMode Emulator::exchange_capture_mode(CaptureMode mode) {
  return std::exchange(thread_state(number_).mode, mode);
}

// Where CUDA may wait for all streams of the process. Emulated GPUs whose memory is known have
// races found without it, and then it would only make the order tamer.
void Emulator::drain_all(const char* call) {
  {
    const Lock lock = locked();
    if (!enter(call)) return;
    require_no_capture(call);
    if (!stands_in_) return;
  }
  if (streams_.drain_all(kLongestDrain)) return;
  const Lock lock = locked();
  violations_.push_back(text("the host waits in ", call, " for a stream that never finishes"));
  throw std::logic_error(violations_.back());
}

// The copy kernel, and that of a dtype and op.
void Emulator::load(Device device, DType dtype, ReduceOp op) {
  {
    const Lock lock = locked();
    const bool copies = loaded_.insert({device, -1, -1}).second;
    if (!loaded_.insert({device, static_cast<int>(dtype), static_cast<int>(op)}).second && !copies)
      return;
  }
  const CaptureModeGuard guard(*this, device);
  drain_all("load");
}

// Waits for all streams at the first launch of a kernel: CUDA may load the kernel there, and
// synchronizes to do so. That is forbidden during a capture.
void Emulator::load_at_launch(Device device, const Launch& launch) {
  const bool copies = std::all_of(launch.tasks.begin(), launch.tasks.end(),
                                  [](const KernelTask& task) { return task.srcs.size() == 1; });
  const int dtype = copies ? -1 : static_cast<int>(launch.dtype);
  const int op = copies ? -1 : static_cast<int>(launch.op);
  {
    const Lock lock = locked();
    if (!loaded_.insert({device, dtype, op}).second) return;
  }
  drain_all("load");
}

// --- streams and events -------------------------------------------------------------------------

Stream Emulator::create_stream(Device device, bool of_caller) {
  const Lock lock = locked();
  enter("create_stream");
  demand(is_device(device), "no device ", device);
  ++counters_["streams"];
  const std::size_t number = streams_.add(of_caller);
  states_.push_back({{device, reinterpret_cast<void*>(number + 1)}, of_caller});  // only compared
  log_.streams = static_cast<int>(states_.size());
  return states_.back().stream;
}

std::size_t Emulator::number(Stream stream) const {
  const Lock lock = locked();
  const auto found = std::find_if(states_.begin(), states_.end(),
                                  [&](const StreamState& s) { return s.stream == stream; });
  demand(found != states_.end(), "the stream does not exist");
  return found - states_.begin();
}

Emulator::StreamState& Emulator::state(Stream stream, const char* call) {
  demand(stream.device == thread_device(), call, " on a stream of device ", stream.device,
         " while device ", thread_device(), " is current");
  StreamState& found = states_[number(stream)];
  demand(!stands_in_ || found.capture == 0, call, " while the stream is capturing");
  return found;
}

Emulator::EventState& Emulator::state(Event event, const char* call) {
  const auto i = reinterpret_cast<std::size_t>(event.handle);
  demand(i >= 1 && i <= events_.size() && events_[i - 1].alive, call,
         " of an event that does not exist");
  return events_[i - 1];
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
  EventState& e = state(event, "record");
  if (!enter("record")) {
    e = {e.device};  // otherwise an earlier record of the event could serve in place of this one
    return;
  }
  StreamState& s = state(stream, "record");
  demand(e.device == stream.device, "an event of device ", e.device,
         " recorded on a stream of device ", stream.device);
  log_call("record", s);
  const std::size_t at = number(stream);
  e = {.device = e.device,
       .recorded = log_point(at),
       .point = streams_.end(at),
       .capture = s.capture,
       .clock = s.clock};
}

int Emulator::log_point(std::size_t stream) {
  const Lock lock = locked();
  log_.operations.push_back({.kind = Operation::Kind::record, .stream = static_cast<int>(stream)});
  return log_start_ + static_cast<int>(log_.operations.size()) - 1;
}

void Emulator::log_passed(int point) {
  const Lock lock = locked();
  if (point >= log_start_)
    log_.operations.push_back({.kind = Operation::Kind::host_wait, .of = point - log_start_});
}

void Emulator::wait(Stream stream, Event event) {
  Lock lock = locked();
  if (!enter("wait")) return;
  StreamState& s = state(stream, "wait");
  const EventState& e = state(event, "wait");
  log_call("wait", s);
  const std::size_t at = number(stream);
  log_.operations.push_back(
      {.kind = Operation::Kind::wait,
       .stream = static_cast<int>(at),
       .of = e.recorded < log_start_ ? Operation::kNone : e.recorded - log_start_});
  if (e.recorded != Operation::kNone) {
    demand(e.capture == 0 || e.capture == capture_,
           "wait for an event of a capture that has ended");
    demand(s.capture == 0 || e.capture == s.capture,
           "a capturing stream waits for work outside of its capture");
    s.capture = e.capture == 0 ? s.capture : e.capture;
    join(s.clock, e.clock);
    streams_.enqueue(at, [this, point = e.point] { return streams_.reach(point); });
  }
  const bool drains = drains_waits_ && s.of_caller;
  lock.unlock();
  if (drains) streams_.drain(at);
}

void Emulator::finish(Stream stream) {
  Lock lock = locked();
  const std::size_t at = number(stream);
  log_.operations.push_back({.kind = Operation::Kind::host_wait, .stream = static_cast<int>(at)});
  lock.unlock();
  streams_.drain(at);
}

// The first query after a record returns false, because real devices take time. Unless a thread
// runs the streams, each later query runs one item of work: on the event's stream, or, if that is
// blocked, on every caller's stream.
bool Emulator::query(Event event) {
  const Lock lock = locked();
  enter("query");
  require_no_capture("query");
  EventState& e = state(event, "query");
  demand(e.capture == 0, "query of an event that was recorded in a capture");
  if (e.recorded == Operation::kNone) return true;
  if (!std::exchange(e.queried, true)) return false;
  if (!streams_.has_thread() && !streams_.passed(e.point) && !streams_.step(e.point.stream))
    for (std::size_t s = 0; s < states_.size(); ++s)
      if (states_[s].of_caller) streams_.step(s);
  if (!streams_.passed(e.point)) return false;
  log_passed(e.recorded);
  if (!std::exchange(e.done, true)) log_call("done", states_[e.point.stream]);
  return true;
}

void Emulator::synchronize(Event event) {
  Lock lock = locked();
  if (!enter("synchronize", "wait")) return;
  const EventState& e = state(event, "synchronize");
  require_no_capture("synchronize");
  demand(e.capture == 0, "the host waits for an event that was recorded in a capture");
  if (e.recorded == Operation::kNone) return;
  log_passed(e.recorded);
  const Point point = e.point;
  lock.unlock();
  streams_.drain(point);
}

void Emulator::synchronize(Stream stream) {
  {
    const Lock lock = locked();
    if (!enter("synchronize")) return;
    require_no_capture("synchronize");
    demand(state(stream, "synchronize").capture == 0, "the host waits for a stream in a capture");
  }
  finish(stream);
}

// --- captures -----------------------------------------------------------------------------------

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
