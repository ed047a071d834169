// Emulates CUDA behind `Api`, without a device. Fails where CUDA would fail, and also where CUDA
// would accept a mistake whose effect appears later and elsewhere. A running emulator executes the
// work of its streams. A recording emulator only records a
// trace, which can be checked for races and run in any order.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../cuda/api.h"
#include "../cuda/pinned_ring.h"
#include "../plan/error.h"
#include "emulated_streams.h"
#include "trace.h"

namespace pycollect::cuda {

enum class MemoryKind { device, pinned, pageable };

inline constexpr unsigned char kPoison = 0xA5;  // content of memory before its first write

// Unless `ok`, throws std::runtime_error, as a failed CUDA call does.
template <class... Parts>
void demand(bool ok, const Parts&... why) {
  if (!ok) throw std::runtime_error(text("CUDA error: ", why...));
}

class Emulator final : public Api, public HostMemoryOps {
 public:
  // Creates a recording emulator with `devices` devices. Their memory comes from `allocate`.
  static std::shared_ptr<Emulator> recording(int devices);
  // Creates a running emulator. It accepts every device, and treats all memory as device memory.
  // Unless `eager`, it runs work as late as CUDA allows.
  static std::shared_ptr<Emulator> running(bool eager);
  ~Emulator() override { streams_.stop(); }

  Device current_device() override;
  void set_device(Device device) override;
  void restore_device(Device device) override { set_device(device); }
  CaptureMode exchange_capture_mode(CaptureMode mode) override;
  Stream create_stream(Device device) override;
  uint64_t capture_id(Stream stream) override;
  void at_graph_end(Stream stream, std::function<void()> destroyed) override;
  void synchronize(Stream stream) override;
  Event create_event(Device device) override;
  void destroy(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool query(Event event) override;
  void synchronize(Event event) override;
  void load(Device device, DType dtype, ReduceOp op) override;
  void launch(Stream stream, const Launch& launch) override;
  void copy(Stream stream, const CopyRect& rectangle) override;

  // HostMemoryOps: the host's work for the executor, which is only recorded in the trace.
  std::byte* new_pinned(std::size_t bytes) override;
  void copy(const CopyRect& rectangle) override;

  // Fault injection and counters, for tests.
  //
  // `fail_call`: the call after `after` more calls of any name throws; < 0: none. `fail`, `kill`,
  // `delay` and `drop` affect calls of one name: all calls after `after` more throw (< 0: none),
  // the process gets SIGKILL in the call after `after` more, every call takes `seconds` longer, and
  // calls succeed without an effect. `block` affects launch and query: the host returns
  // only when the stream's work up to there is done, as with CUDA_LAUNCH_BLOCKING=1, a full queue
  // of launches, or a lock of the driver that another such call holds.
  void fail_call(int after);
  void fail(const std::string& call, int after);
  void kill(const std::string& call, int after);
  void delay(const std::string& call, double seconds);
  void drop(const std::string& call, bool on);
  void block(const std::string& call, bool on);
  // From now on `current_device` returns this device, which is not the thread's current one, until
  // the next `set_device`: torch restores a device lazily if it has no context.
  void report_device(Device device);
  void set_pause(double seconds);               // pause of the streams' thread between two rounds
  std::map<std::string, int> counters() const;  // resources held now, and number of calls by name
  std::vector<std::string> violations() const;  // descriptions of all violations of the rules
  std::vector<std::string> calls() const;  // stream calls, each followed by " caller" or " group"
  void begin_capture(Stream stream);
  int end_capture(Stream stream);  // returns the capture's number
  void destroy_graph(int capture);
  // Allows work outside of an active capture, as that of other threads.
  void allow_eager_work(bool on) { allows_eager_work_ = on; }
  // For calls outside of `Api`: `enter` counts the call and injects its faults; `synchronize_all`
  // also waits for all streams.
  void enter(const char* call);
  // For calls that may synchronize: fails in a capture, unless the thread's mode is relaxed.
  void require_no_capture(const char* call) const;
  void synchronize_all(const char* call);
  // Enqueues work on a stream of the current device, without a race check.
  void enqueue(Stream stream, const char* call, EmulatedStreams::Work work);

  // Running emulator: a caller's stream is a current stream of the program, outside of the group.
  enum class Owner { none, caller, group };
  Stream create_stream_of(Owner owner, Device device);
  void drain_waits(bool on);  // whether enqueueing a wait on a caller's stream drains that stream
  bool drains_waits() const { return drains_waits_; }
  bool captures() const { return capture_ != 0; }
  EmulatedStreams& streams() { return streams_; }
  std::size_t number(Stream stream) const;

  // Recording emulator: after `connect`, device `from` can access the memory of device `to`.
  void connect(Device from, Device to) { peers_[from][to] = true; }
  std::byte* allocate(MemoryKind kind, Device device, std::size_t bytes);
  void adopt(MemoryKind kind, std::byte* memory, std::size_t bytes);  // host memory of others
  MemoryKind kind_of(const std::byte* address) const;  // memory that is not known is pageable
  // Records work outside of the executor: on a stream, or of the host.
  void stream_work(Stream stream, std::string what, std::vector<MemoryAccess> accesses,
                   std::function<void()> act);
  void host_work(std::string what, std::vector<MemoryAccess> accesses, std::function<void()> act);
  const Trace& trace() const { return trace_; }
  void drop_wait(int number);  // removes a wait from the trace, as if it had not been issued
  void clear_trace();          // also marks every event as not recorded

 private:
  using Lock = EmulatedStreams::Lock;
  struct StreamState {
    Stream stream;
    Owner owner;
    int capture = 0;              // number of its capture; 0: none
    std::vector<int> clock = {};  // [stream]: items of its work that are ordered before
  };
  struct EventState {
    Device device;
    bool alive = true;
    bool queried = false;             // since the last record
    bool logged = false;              // its completion has been added to `calls`
    int recorded = Operation::kNone;  // index of the record operation in the trace
    Point point = {};
    bool is_recorded = false;
    int capture = 0;
    std::vector<int> clock = {};
  };
  struct EmulatedAllocation {
    std::size_t bytes;
    MemoryKind kind;
    Device device;
    std::unique_ptr<std::byte[]> storage;
  };

  Emulator(int devices, bool records, bool eager);
  Lock locked() const { return Lock(const_cast<EmulatedStreams&>(streams_).mutex); }
  bool is_dropped(const char* call) const { return dropped_.contains(call); }
  bool is_device(Device device) const;
  void load(Stream stream, const Launch& launch);
  void return_late(const char* call, Lock& lock, Point to);
  [[noreturn]] void violation(const std::string& what);
  Device thread_device() const;  // current_device(), not counted
  StreamState& state(Stream stream, const char* call);
  EventState& state(Event event, const char* call);
  void log(const char* call, const StreamState& stream);
  void enqueue(Stream stream, Operation operation);
  const EmulatedAllocation* find(const std::byte* address) const;  // null: unknown
  const EmulatedAllocation& region(const std::byte* begin, std::size_t bytes) const;
  void require_access(Device device, const std::byte* begin, std::size_t bytes) const;
  std::vector<MemoryAccess> accesses(Device device, const LaunchWork& work, std::size_t item,
                                     int part) const;
  std::vector<MemoryAccess> accesses(const CopyRect& rectangle) const;

  const std::uint64_t number_;  // of the emulator: another one may get its address later
  const bool records_;
  EmulatedStreams streams_;
  std::vector<std::vector<bool>> peers_;
  std::vector<StreamState> states_;  // [stream]
  std::vector<EventState> events_;
  std::map<const std::byte*, EmulatedAllocation> regions_;
  std::set<std::array<int, 3>> loaded_;  // kernels loaded so far, as (device, dtype, op)
  Trace trace_;
  std::map<std::string, int> counters_, failing_, killing_;
  std::map<std::string, std::chrono::duration<double>> delays_;
  std::set<std::string> dropped_, blocking_;
  std::vector<std::string> violations_, calls_;
  bool drains_waits_ = true;
  int capture_ = 0, captures_ = 0;  // number of the active capture (0: none), and captures so far
  bool allows_eager_work_ = false;
  std::map<int, std::vector<std::function<void()>>> at_graph_end_;  // [capture]
  int fail_after_ = -1;
};

}  // namespace pycollect::cuda
