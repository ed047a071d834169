// Emulates CUDA without a device behind `Api`: fails where CUDA would fail, and also where CUDA
// would let a mistake pass that shows up later elsewhere. Either its streams do the work, in host
// memory that processes share (`that_runs`), or it only records a trace, which can be checked for
// races and run in any order (`that_records`).
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../cuda/api.h"
#include "../cuda/pinned_ring.h"
#include "../plan/error.h"
#include "emulated_streams.h"
#include "trace.h"

namespace pycollect::cuda {

enum class MemoryKind { device, pinned, pageable };

inline constexpr unsigned char kPoison = 0xA5;  // fills memory that has not been written yet

// Throws std::runtime_error as a failed CUDA call does, unless `ok`.
template <class... Parts>
void demand(bool ok, const Parts&... why) {
  if (!ok) throw std::runtime_error(text("CUDA error: ", why...));
}

inline std::atomic<uint64_t>& word_at(std::byte* at) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(at);
}

class Emulator final : public Api, public Host {
 public:
  // Records a trace. Has `devices` devices, whose memory is what `allocate` returns.
  static std::shared_ptr<Emulator> that_records(int devices);
  // Runs the work. Accepts any device and treats any memory as its memory. Unless `eager`, it runs
  // everything as late as allowed.
  static std::shared_ptr<Emulator> that_runs(bool eager);
  ~Emulator() override;

  Device current_device() override;
  void set_device(Device device) override;
  void restore_device(Device device) override { set_device(device); }
  std::string identity(Device device) override;
  CaptureMode exchange_capture_mode(CaptureMode mode) override;
  Stream create_stream(Device device) override;
  void destroy(Stream stream) override;
  bool is_capturing(Stream stream) override;
  void synchronize(Stream stream) override;
  Event create_event(Device device) override;
  void destroy(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool query(Event event) override;
  void synchronize(Event event) override;
  void launch(Stream stream, const Launch& launch) override;
  void copy(Stream stream, const CopyRect& rectangle) override;
  void fill(Stream stream, std::byte* memory, unsigned char value, std::size_t bytes) override;
  void write_value(Stream stream, std::byte* word, uint64_t value) override;
  void wait_value(Stream stream, std::byte* word, uint64_t value) override;
  std::byte* allocate(Device device, std::size_t bytes) override;
  Exported export_memory(std::byte* memory) override;
  std::byte* map(Device device, const shm::Descriptor& memory, std::size_t bytes) override;
  void unmap(std::byte* memory) override;
  std::byte* register_host(std::byte* memory, std::size_t bytes) override;
  void unregister_host(std::byte* memory) override;

  // Host: work of the host for the executor, only recorded in the trace.
  std::byte* new_pinned(std::size_t bytes) override;
  void copy(const CopyRect& rectangle) override;

  // Fault injection and counters, for tests.
  void fail_call(int in);                      // `in` more calls succeed, and the next one throws
  void fail(const std::string& call, int in);  // all calls of it throw after `in` more; < 0: none
  void kill(const std::string& call, int in);  // SIGKILL in the call after `in` more of this name
  void delay(const std::string& call, double seconds);
  void drop(const std::string& call, bool on);  // the call succeeds and has no effect
  void live_on(const std::string& gpu);         // sets the identity of every device
  void pace(double seconds);                    // the streams' thread pauses between two rounds
  std::map<std::string, int> counters() const;  // resources held now, and number of calls by name
  std::vector<std::string> violations() const;  // violations of the rules, in words
  std::vector<std::string> calls() const;       // stream calls, each " caller" or " group"
  void begin_capture(Stream stream);
  void end_capture(Stream stream);
  // For calls outside `Api`: `enter` counts the call and injects its faults; `synchronize_all` does
  // that and waits for all streams.
  void enter(const char* call);
  void synchronize_all(const char* call);
  // Bracket the release of a tensor's memory: a violation on the thread "pycollect gpu", which
  // nothing may block.
  void begin_free();
  void end_free();
  // Enqueues work without a race check on a stream of the current device.
  void enqueue(Stream stream, const char* call, EmulatedStreams::Work work);

  // For an emulator that runs. A caller's stream is a current stream outside the group. A group's
  // stream may wait only for a value whose write has been enqueued.
  enum class Owner { nobody, caller, group };
  Stream create_stream_of(Owner owner, Device device);
  void look(bool on);  // whether a wait on a caller's stream drains that stream at once
  bool looks() const { return looks_; }
  bool captures() const { return capture_ != 0; }
  EmulatedStreams& streams() { return streams_; }
  std::size_t number(Stream stream) const;

  // For an emulator that records. After `connect`, device `from` can touch memory of device `to`.
  void connect(Device from, Device to) { peers_[from][to] = true; }
  std::byte* allocate(MemoryKind kind, Device device, std::size_t bytes);
  void begin_call() { ++call_; }  // within one call an event is recorded at most once
  // Record an access outside the executor: by other work on a stream, or by the host.
  void somebody(Stream stream, std::string what, std::vector<Touch> touches,
                std::function<void()> act);
  void host(std::string what, std::vector<Touch> touches, std::function<void()> act);
  const Trace& trace() const { return trace_; }
  void drop_wait(int number);  // removes a wait, as if it had never been issued
  void forget_trace();         // clears the trace and marks every event as not recorded

 private:
  using Lock = EmulatedStreams::Lock;
  struct StreamState {
    Stream stream;
    Owner owner;
    int capture = 0;              // number of its capture; 0: none
    std::vector<int> clock = {};  // [stream]: pieces of its work that are ordered before
  };
  struct EventState {
    Device device;
    bool alive = true, asked = false, seen = false;
    int recorded = Operation::kNobody;  // index of the record operation in the trace
    Point point = {};
    bool is_recorded = false;
    int capture = 0, call = -1;
    std::vector<int> clock = {};
  };
  struct Region {
    std::size_t bytes;
    MemoryKind kind;
    Device device;
    std::unique_ptr<std::byte[]> storage;
  };
  struct Shared {  // device memory that processes share: allocated here (own), or mapped
    std::size_t bytes;
    shm::Descriptor file;
    bool own;
  };

  Emulator(int devices, bool records, bool eager);
  Lock locked() const { return Lock(const_cast<EmulatedStreams&>(streams_).mutex); }
  bool is_dropped(const char* call) const { return dropped_.contains(call); }
  bool is_device(Device device) const;
  void may_load(const Launch& launch);
  [[noreturn]] void violation(const std::string& what);
  void require_no_capture(const char* call) const;
  StreamState& state(Stream stream, const char* call);
  EventState& state(Event event, const char* call);
  void note(const char* call, const StreamState& stream);
  void enqueue(Stream stream, Operation operation);
  const Region& region(const std::byte* begin, std::size_t bytes) const;
  void reachable(Device device, const std::byte* begin, std::size_t bytes) const;
  bool is_registered(const std::byte* word) const;
  std::vector<Touch> touches(Device device, const KernelRow& row, std::size_t item, int part) const;
  std::vector<Touch> touches(const CopyRect& rectangle) const;

  const bool records_;
  EmulatedStreams streams_;
  std::string identity_ = "the GPU that is not there";
  std::vector<std::vector<bool>> peers_;
  std::vector<StreamState> states_;  // [stream]
  std::vector<EventState> events_;
  std::map<const std::byte*, Region> regions_;
  std::map<std::byte*, Shared> shared_;
  std::map<std::byte*, std::size_t> registered_;
  std::set<std::pair<int, int>> loaded_;  // kernels loaded so far, as (dtype, op)
  Trace trace_;
  std::map<std::string, int> counters_, failing_, killing_;
  std::map<std::string, std::chrono::duration<double>> delays_;
  std::set<std::string> dropped_;
  std::vector<std::string> violations_, calls_;
  bool looks_ = true;
  int capture_ = 0, captures_ = 0;  // number of the active capture (0: none), and captures so far
  int call_ = 0, fail_in_ = -1;
};

}  // namespace pycollect::cuda
