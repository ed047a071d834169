// CUDA without a device, beneath everything that asks for it: fails where CUDA would fail, and
// where CUDA would let a mistake pass that shows elsewhere later. Either its streams do the work,
// in host memory that processes share (`runs`), or nothing happens but a trace of it, which can be
// judged and run in any order (`records`).
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../cuda/api.h"
#include "../cuda/ring.h"
#include "../plan/error.h"
#include "emulated_streams.h"
#include "trace.h"

namespace pycollect::cuda {

enum class MemoryKind { device, pinned, pageable };

inline constexpr unsigned char kPoison = 0xA5;  // what nobody has written to yet

// Throws what CUDA would.
template <class... Parts>
void demand(bool ok, const Parts&... why) {
  if (!ok) throw std::runtime_error(text("CUDA error: ", why...));
}

inline std::atomic<uint64_t>& word_at(std::byte* at) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(at);
}

class Emulator final : public Api, public Host {
 public:
  // With so many devices, whose memory is what is allocated here.
  static std::shared_ptr<Emulator> that_records(int devices);
  // Any device, in whose memory is whatever it is given. Unless it is `eager`, it does everything
  // as late as it may.
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
  void copy(Stream stream, const Rectangle& rectangle) override;
  void fill(Stream stream, std::byte* memory, unsigned char value, std::size_t bytes) override;
  void write_value(Stream stream, std::byte* word, uint64_t value) override;
  void wait_value(Stream stream, std::byte* word, uint64_t value) override;
  std::byte* allocate(Device device, std::size_t bytes) override;
  Exported export_memory(std::byte* memory) override;
  std::byte* map(Device device, const shm::Descriptor& memory, std::size_t bytes) override;
  void unmap(std::byte* memory) override;
  std::byte* register_host(std::byte* memory, std::size_t bytes) override;
  void unregister_host(std::byte* memory) override;

  // What the host does for the executor, at once or never.
  std::byte* new_pinned(std::size_t bytes) override;
  void copy(const Rectangle& rectangle) override;

  // The scenery, and what became of it.
  void fail_call(int in);                      // so many more calls go well, and then one does not
  void fail(const std::string& call, int in);  // the same of those of this name; negative: none
  void kill(const std::string& call, int in);  // the process dies there
  void delay(const std::string& call, double seconds);
  void drop(const std::string& call, bool on);  // it says that it did it, and does nothing
  void live_on(const std::string& gpu);         // its identity
  void pace(double seconds);                    // between two steps of a stream
  std::map<std::string, int> books() const;  // what is given out now, and how often what was done
  std::vector<std::string> fouls() const;
  std::vector<std::string> calls() const;  // on streams, of a caller's or of the group's
  void begin_capture(Stream stream);
  void end_capture(Stream stream);
  // Of whatever else asks for a device: does the books, fails as told, and waits for all streams.
  void enter(const char* call);
  void synchronize_all(const char* call);
  // A tensor's memory goes back: not from a thread that nothing may hold up.
  void begin_free();
  void end_free();
  // Work that nobody judges, on a stream of the current device.
  void enqueue(Stream stream, const char* call, EmulatedStreams::Work work);

  // Of one that runs. A caller's stream is one that others have as their current one; the group's
  // waits for nothing that nobody has been told to write.
  enum class Owner { nobody, caller, group };
  Stream create_stream_of(Owner owner, Device device);
  void look(bool on);  // who has a caller's stream wait looks then, which takes an empty stream
  bool looks() const { return looks_; }
  bool captures() const { return capture_ != 0; }
  EmulatedStreams& streams() { return streams_; }
  std::size_t number(Stream stream) const;

  // Of one that records.
  void connect(Device from, Device to) { peers_[from][to] = true; }  // `from` can touch `to`'s
  std::byte* allocate(MemoryKind kind, Device device, std::size_t bytes);
  void begin_call() { ++call_; }  // within one an event is recorded once
  // What somebody else does to this memory on a stream, or the host while nothing runs.
  void somebody(Stream stream, std::string what, std::vector<Touch> touches,
                std::function<void()> act);
  void host(std::string what, std::vector<Touch> touches, std::function<void()> act);
  const Trace& trace() const { return trace_; }
  void drop_wait(int number);  // as if it had never been issued
  void forget_trace();         // and with it what events stood for

 private:
  using Lock = EmulatedStreams::Lock;
  struct StreamState {
    Stream stream;
    Owner owner;
    int capture = 0;              // 0: none
    std::vector<int> clock = {};  // [stream]: how much work is known to come before
  };
  struct EventState {
    Device device;
    bool alive = true, asked = false, seen = false;
    int recorded = Operation::kNobody;  // the operation
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
  struct Shared {  // that processes share
    std::size_t bytes;
    shm::Descriptor file;
    bool own;
  };

  Emulator(int devices, bool records, bool eager);
  Lock locked() const { return Lock(const_cast<EmulatedStreams&>(streams_).mutex); }
  bool is_dropped(const char* call) const { return dropped_.contains(call); }
  bool is_device(Device device) const;
  void may_load(const Launch& launch);
  [[noreturn]] void foul(const std::string& what);
  void require_no_capture(const char* call) const;
  StreamState& state(Stream stream, const char* call);
  EventState& state(Event event, const char* call);
  void note(const char* call, const StreamState& stream);
  void enqueue(Stream stream, Operation operation);
  const Region& region(const std::byte* begin, std::size_t bytes) const;
  void reachable(Device device, const std::byte* begin, std::size_t bytes) const;
  bool is_registered(const std::byte* word) const;
  std::vector<Touch> touches(Device device, const Row& row, std::size_t item, int part) const;
  std::vector<Touch> touches(const Rectangle& rectangle) const;

  const bool records_;
  EmulatedStreams streams_;
  std::string identity_ = "the GPU that is not there";
  std::vector<std::vector<bool>> peers_;
  std::vector<StreamState> states_;  // [stream]
  std::vector<EventState> events_;
  std::map<const std::byte*, Region> regions_;
  std::map<std::byte*, Shared> shared_;
  std::map<std::byte*, std::size_t> registered_;
  std::set<std::pair<int, int>> loaded_;  // kernels, by dtype and op
  Trace trace_;
  std::map<std::string, int> books_, failing_, killing_;
  std::map<std::string, std::chrono::duration<double>> delays_;
  std::set<std::string> dropped_;
  std::vector<std::string> fouls_, calls_;
  bool looks_ = true;
  int capture_ = 0, captures_ = 0;  // the one under way, and how many there were
  int call_ = 0, fail_in_ = -1;
};

}  // namespace pycollect::cuda
