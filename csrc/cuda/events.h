// Pool of events, which are created per device and reused. A CUDA wait refers to the event's latest
// record when the wait is enqueued. So an event may be recorded again as soon as the run that used
// it has enqueued all of its waits, however much of that work is pending on the devices.
#pragma once
#include <map>
#include <mutex>
#include <vector>

#include "api.h"

namespace pycollect::cuda {

class EventPool {
 public:
  explicit EventPool(Api& api) : api_(api) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  Event take(Device device);  // `device` must be current
  void give_back(Event event) noexcept;
  Api& api() const { return api_; }

 private:
  struct DeviceEvents {
    std::vector<Event> idle = {};  // events that no run uses
    std::size_t created = 0;
  };
  Api& api_;
  std::mutex mutex_;
  std::map<Device, DeviceEvents> by_device_;
};

// The events of one run; none is used twice in it. Events that are recorded in a capture belong to
// the captured graph, so a captured run creates events of its own.
class RunEvents {
 public:
  RunEvents(EventPool& pool, bool for_capture) : pool_(pool), for_capture_(for_capture) {}
  ~RunEvents();
  RunEvents(const RunEvents&) = delete;
  RunEvents& operator=(const RunEvents&) = delete;

  Event take(Device device);  // `device` must be current

 private:
  EventPool& pool_;
  const bool for_capture_;
  std::vector<Event> taken_;
};

// An event with several users, recorded once. It is given back with its last user.
class SharedEvent {
 public:
  // Records the event on the stream, whose device must be current.
  SharedEvent(EventPool& pool, Stream stream, bool for_capture)
      : owner_(pool, for_capture), event_(owner_.take(stream.device)) {
    pool.api().record(event_, stream);
  }
  Event event() const { return event_; }

 private:
  RunEvents owner_;
  const Event event_;
};

}  // namespace pycollect::cuda
