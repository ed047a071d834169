// Emulates CUDA behind `Api`, without a device: runs the work of its streams on host memory, in an
// order that CUDA allows, and logs it, so that accesses that nothing orders are found even if the
// order was harmless. Threads of the program count as one: an order that only they could give is
// taken for granted. Fails where CUDA would fail, and also where CUDA would accept a mistake whose
// effect appears later and elsewhere.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../cuda/api.h"
#include "../cuda/pinned_ring.h"
#include "../plan/error.h"
#include "emulated_streams.h"
#include "work_log.h"

namespace pycollect::cuda {

enum class MemoryKind { device, pinned, pageable };

inline constexpr unsigned char kPoison = 0xA5;  // content of memory before its first write

// Unless `ok`, throws std::runtime_error, as a failed CUDA call does.
template <class... Parts>
void demand(bool ok, const Parts&... why) {
  if (!ok) throw std::runtime_error(text("CUDA error: ", why...));
}

// What happens before a call has an effect. `fail` and `skip` concern one call, after `after` more
// calls of the name (every call, if negative): it throws, or has no effect. `slow`: every call
// takes `seconds` longer. `lost`: from the call on, all calls of any name throw, as on a lost
// device.
enum class FaultKind { fail, skip, slow, lost };
struct Fault {
  FaultKind kind;
  std::string call = {};  // name; empty: calls of any name
  int after = 0;
  double seconds = 0;
};

class Emulator final : public Api, public HostMemoryOps {
 public:
  // `stands_in`: CPU tensors stand for tensors of the device. Memory that is not known counts as
  // the device's, and its accesses are not logged. Work of a capture would never be replayed, so
  // it fails; other threads may enqueue work meanwhile.
  explicit Emulator(int devices, bool stands_in = false);
  ~Emulator() override { streams_.stop(); }

  Device current_device() override;
  void set_device(Device device) override;
  void restore_device(Device device) override { set_device(device); }
  CaptureMode exchange_capture_mode(CaptureMode mode) override;
  Stream create_stream(Device device) override { return create_stream(device, false); }
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

  // HostMemoryOps.
  std::byte* new_pinned(std::size_t bytes) override;
  void copy(const CopyRect& rectangle) override;
  PinnedRingSize ring_size() const override { return ring_size_; }
  void set_ring_size(PinnedRingSize size) { ring_size_ = size; }  // of later rings

  // For functions outside of `Api` that call CUDA: counts a call, and injects its fault. Returns
  // false if the call must have no effect. `also`: a second name by which faults find the call.
  bool enter(const char* call, const char* also = "");
  bool skips(
      const char* call);  // likewise for functions of torch, which only the fault `skip` hits
  // For calls that may synchronize: fails in a capture, unless the thread's mode is relaxed.
  void require_no_capture(const char* call) const;
  // Enqueues work on a stream of the current device, or work of a caller, which is not counted.
  void enqueue(Stream stream, const char* call, std::vector<MemoryAccess> accesses,
               std::function<void()> act);
  void caller_work(Stream stream, std::string what, std::vector<MemoryAccess> accesses,
                   std::function<void()> act);
  // Work of the host, which is done when the function returns.
  void host_work(std::string what, std::vector<MemoryAccess> accesses,
                 const std::function<void()>& act);
  void finish(Stream stream);  // the host waits for the work that is on the stream now
  // Log a point of a stream, and that the host has found it passed, as torch's allocators do.
  // Points of an earlier log are passed.
  int log_point(std::size_t stream);
  void log_passed(int point);

  // `of_caller`: the stream is a current one of the program, outside of the library.
  Stream create_stream(Device device, bool of_caller);
  std::size_t number(Stream stream) const;
  EmulatedStreams& streams() { return streams_; }
  EmulatedStreams::Lock locked() const;

  // Sets whether device `from` can access the memory of device `to`.
  void connect(Device from, Device to, bool on) { peers_[from][to] = on; }
  std::byte* allocate(MemoryKind kind, Device device, std::size_t bytes);
  void adopt(MemoryKind kind, std::byte* memory, std::size_t bytes);  // host memory of others
  MemoryKind kind_of(const std::byte* address) const;
  bool knows(const std::byte* address) const { return find(address) != nullptr; }

  void begin_capture(Stream stream);
  int end_capture(Stream stream);  // returns the capture's number
  void destroy_graph(int capture);
  // Allows work outside of an active capture, as that of other threads.
  void allow_eager_work(bool on) { allows_eager_work_ = on; }

  void inject(std::optional<Fault> fault);  // replaces the fault before
  // From now on `current_device` returns this device, which is not the thread's current one, until
  // the next `set_device`: torch restores a device lazily if it has no context.
  void report_device(Device device);
  // Whether a wait of a caller's stream, when it is enqueued, makes the host wait for the stream:
  // if CPU tensors stand for the device's, the caller reads them without a copy.
  void drain_waits(bool on);
  bool drains_waits() const { return drains_waits_; }

  std::map<std::string, int> counters() const;  // resources held now, and number of calls by name
  // Returns descriptions of all violations of the rules, and of a race. Begins a new log if no work
  // is left.
  std::vector<std::string> violations();
  std::vector<std::string> calls() const;  // stream calls, each followed by " caller" or " group"
  std::string race() const;                // description of the first race of the log, or ""
  // Returns the number of waits of the log for events, and those whose removal causes no race.
  std::pair<int, std::vector<int>> redundant_waits() const;
  // Begins a new log, when all work is done.
  void clear_log();

 private:
  using Lock = EmulatedStreams::Lock;
  struct StreamState {
    Stream stream;
    bool of_caller;
    int capture = 0;              // number of its capture; 0: none
    std::vector<int> clock = {};  // [stream]: items of its work that are ordered before
  };
  struct EventState {
    Device device;
    bool alive = true;
    bool queried = false;             // since the last record
    bool done = false;                // its completion has been added to `calls`
    int recorded = Operation::kNone;  // number of the last record, see log_start_
    Point point = {};
    int capture = 0;
    std::vector<int> clock = {};
  };
  struct EmulatedAllocation {
    std::size_t bytes;
    MemoryKind kind;
    Device device;
    std::unique_ptr<std::byte[]> storage;
  };

  bool is_due();  // whether the fault concerns this call, which has its name
  bool is_device(Device device) const;
  Device thread_device() const;  // current_device(), not counted
  StreamState& state(Stream stream, const char* call);
  EventState& state(Event event, const char* call);
  void log_call(const char* call, const StreamState& stream);
  void add(Stream stream, Operation operation, std::function<void()> act);
  void load_at_launch(Device device, const Launch& launch);
  void drain_all(const char* call);
  const EmulatedAllocation* find(const std::byte* address) const;  // null: unknown
  const EmulatedAllocation& region(const std::byte* begin, std::size_t bytes) const;
  void require_access(Device device, const std::byte* begin, std::size_t bytes) const;
  std::vector<MemoryAccess> accesses(Device device, const KernelTask& task, const Launch& how,
                                     int part) const;
  std::vector<MemoryAccess> accesses(const CopyRect& rectangle) const;

  const std::uint64_t number_;  // of the emulator: another one may get its address later
  const bool stands_in_;
  PinnedRingSize ring_size_;
  EmulatedStreams streams_;  // its mutex guards the members below
  std::vector<std::vector<bool>> peers_;
  std::vector<StreamState> states_;  // [stream]
  std::vector<EventState> events_;
  std::map<const std::byte*, EmulatedAllocation> regions_;
  std::set<std::array<int, 3>> loaded_;  // kernels loaded so far, as (device, dtype, op)
  WorkLog log_;
  int log_start_ = 0;  // number of the log's first operation; they are counted over all logs
  std::map<std::string, int> counters_;
  std::optional<Fault> fault_;
  std::vector<std::string> violations_, calls_;
  bool drains_waits_;
  bool allows_eager_work_;
  int capture_ = 0, captures_ = 0;  // number of the active capture (0: none), and captures so far
  std::map<int, std::vector<std::function<void()>>> at_graph_end_;  // [capture]
};

}  // namespace pycollect::cuda
