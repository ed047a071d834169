// The eleven calls without a device: nothing happens but a trace of it, which can be judged and
// run. Fails where CUDA would fail, and where CUDA would let a mistake pass that shows elsewhere
// later.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../cuda/ring.h"
#include "../cuda/runtime.h"
#include "trace.h"

namespace pycollect::cuda {

enum class MemoryKind { device, pinned, pageable };

class FakeCuda final : public Runtime, public Host {
 public:
  struct Counts {
    int launches = 0, rows = 0, copies = 0, records = 0, waits = 0, events = 0, alive = 0,
        synchronizations = 0, host_copies = 0;
  };

  explicit FakeCuda(int devices);

  Device current_device() override { return current_; }
  void set_device(Device device) override;
  Event create_event(Device device) override;
  void destroy_event(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void launch(Stream stream, const Launch& launch) override;
  void copy(Stream stream, const Rectangle& rectangle) override;
  bool is_capturing(Stream stream) override;
  void synchronize(Stream stream) override;
  void synchronize(Event event) override;

  // What the host does for the executor, at once or never.
  std::byte* new_pinned(std::size_t bytes) override;
  void copy(const Rectangle& rectangle) override;

  // The scenery.
  Stream make_stream(Device device);
  void connect(Device from, Device to) { peers_[from][to] = true; }  // `from` can touch `to`'s
  std::byte* allocate(MemoryKind kind, Device device, std::size_t bytes);
  void begin_capture(Stream stream);
  void end_capture(Stream stream);
  void begin_call() { ++call_; }             // within one an event is recorded once
  void fail_call(int in) { fail_in_ = in; }  // so many more calls go well, and then one does not
  // What somebody else does to this memory on a stream, or the host while nothing runs.
  void somebody(Stream stream, std::string what, std::vector<Touch> touches,
                std::function<void()> act);
  void host(std::string what, std::vector<Touch> touches, std::function<void()> act);

  const Trace& trace() const { return trace_; }
  void drop_wait(int number);  // as if it had never been issued
  void forget_trace();         // and with it what events stood for
  const Counts& counts() const { return counts_; }

 private:
  struct StreamState {
    Stream stream;
    int capture = 0;              // 0: none
    std::vector<int> clock = {};  // [stream]: how much work is known to come before
  };
  struct EventState {
    Device device;
    bool alive = true;
    int recorded = Operation::kNobody;  // the operation
    int capture = 0, call = -1;
    std::vector<int> clock = {};
  };
  struct Region {
    std::size_t bytes;
    MemoryKind kind;
    Device device;
    std::unique_ptr<std::byte[]> storage;
  };

  void may_fail();
  int number(Stream stream) const;
  StreamState& state(Stream stream, const char* call);
  EventState& state(Event event, const char* call);
  const Region& region(const std::byte* begin, std::size_t bytes) const;
  void reachable(Device device, const std::byte* begin, std::size_t bytes) const;
  std::vector<Touch> touches(Device device, const Row& row, std::size_t item, int part) const;
  Operation& work(Stream stream, std::string what);
  std::vector<Touch> touches(const Rectangle& rectangle) const;

  Device current_ = 0;
  std::vector<std::vector<bool>> peers_;
  std::vector<StreamState> streams_;
  std::vector<EventState> events_;
  std::map<const std::byte*, Region> regions_;
  Trace trace_;
  Counts counts_;
  int capture_ = 0, captures_ = 0;  // the one under way, and how many there were
  int call_ = 0, fail_in_ = -1;
};

}  // namespace pycollect::cuda
