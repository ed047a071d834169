// Fault injection, counters and trace controls of the emulator (emulator.h).
#include <atomic>
#include <csignal>
#include <cstdint>

#include "emulator.h"

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

}  // namespace

Emulator::Emulator(int devices, bool records, bool eager)
    : number_(++emulators),
      records_(records),
      streams_(eager),
      peers_(devices, std::vector<bool>(devices)) {
  for (int d = 0; d < devices; ++d) {  // default streams
    streams_.add();
    states_.push_back({{d, nullptr}, Owner::none});
  }
  trace_.streams = devices;
}

std::shared_ptr<Emulator> Emulator::recording(int devices) {
  demand(devices >= 1, "an emulator needs at least one device");
  return std::shared_ptr<Emulator>(new Emulator(devices, true, false));
}

std::shared_ptr<Emulator> Emulator::running(bool eager) {
  return std::shared_ptr<Emulator>(new Emulator(0, false, eager));
}

bool Emulator::is_device(Device device) const {
  return records_ ? device >= 0 && device < static_cast<int>(peers_.size()) : device >= -1;
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

void Emulator::violation(const std::string& what) {
  violations_.push_back(what);
  throw std::logic_error(what);
}

void Emulator::enter(const char* call) {
  const Lock lock = locked();
  ++counters_[call];
  if (const auto found = killing_.find(call); found != killing_.end() && found->second-- <= 0)
    std::raise(SIGKILL);
  if (const auto found = delays_.find(call); found != delays_.end())
    std::this_thread::sleep_for(found->second);
  const auto named = failing_.find(call);
  const bool fails = named != failing_.end() && named->second-- <= 0;
  if (fails || (fail_after_ >= 0 && fail_after_-- == 0))
    demand(false, "injected failure in ", call);
}

void Emulator::require_no_capture(const char* call) const {
  demand(capture_ == 0 || thread_state(number_).mode == CaptureMode::relaxed, call,
         " is not permitted while a stream is capturing");
}

void Emulator::synchronize_all(const char* call) {
  {
    const Lock lock = locked();
    enter(call);
    require_no_capture(call);
    if (records_) return;
  }
  if (streams_.drain_all(kLongestDrain)) return;
  const Lock lock = locked();
  violation(text("the host waits in ", call, " for a stream that never finishes"));
}

void Emulator::fail_call(int after) {
  const Lock lock = locked();
  fail_after_ = after;
}

void Emulator::fail(const std::string& call, int after) {
  const Lock lock = locked();
  failing_.erase(call);
  if (after >= 0) failing_[call] = after;
}

void Emulator::kill(const std::string& call, int after) {
  const Lock lock = locked();
  killing_[call] = after;
}

void Emulator::delay(const std::string& call, double seconds) {
  const Lock lock = locked();
  delays_[call] = std::chrono::duration<double>(seconds);
}

void Emulator::drop(const std::string& call, bool on) {
  const Lock lock = locked();
  dropped_.erase(call);
  if (on) dropped_.insert(call);
}

void Emulator::block(const std::string& call, bool on) {
  const Lock lock = locked();
  blocking_.erase(call);
  if (on) blocking_.insert(call);
}

// Ends a call that `block` affects: unlocks, and waits until the stream has reached `to`.
void Emulator::return_late(const char* call, Lock& lock, Point to) {
  if (!blocking_.contains(call)) return;
  lock.unlock();
  streams_.drain(to);
}

void Emulator::set_pause(double seconds) {
  const Lock lock = locked();
  streams_.pause_for(std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6)));
}

void Emulator::drain_waits(bool on) {
  const Lock lock = locked();
  drains_waits_ = on;
}

std::map<std::string, int> Emulator::counters() const {
  const Lock lock = locked();
  return counters_;
}

std::vector<std::string> Emulator::violations() const {
  const Lock lock = locked();
  return violations_;
}

std::vector<std::string> Emulator::calls() const {
  const Lock lock = locked();
  return calls_;
}

void Emulator::stream_work(Stream stream, std::string what, std::vector<MemoryAccess> accesses,
                           std::function<void()> act) {
  Operation o{.kind = Operation::Kind::work, .what = std::move(what)};
  o.accesses = std::move(accesses);
  o.parts.push_back(std::move(act));
  enqueue(stream, std::move(o));
}

void Emulator::host_work(std::string what, std::vector<MemoryAccess> accesses,
                         std::function<void()> act) {
  Operation o{
      .kind = Operation::Kind::host_work, .what = std::move(what), .accesses = std::move(accesses)};
  o.parts.push_back(std::move(act));
  trace_.operations.push_back(std::move(o));
}

void Emulator::drop_wait(int number) {
  using Kind = Operation::Kind;
  for (Operation& o : trace_.operations)
    if (is_for_event(o) && number-- == 0)
      o = {.kind = o.kind == Kind::wait ? Kind::wait : Kind::host_work, .stream = o.stream};
}

void Emulator::clear_trace() {
  trace_.operations.clear();
  for (EventState& e : events_) e.is_recorded = false;
}

}  // namespace pycollect::cuda
