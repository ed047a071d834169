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

// An event that is recorded once, and given back at the end of its life. One that is recorded in a
// capture belongs to the captured graph, so it does not come from the pool.
class RecordedEvent {
 public:
  // Records the event on the stream, whose device must be current.
  RecordedEvent(EventPool& pool, Stream stream, bool for_capture)
      : RecordedEvent(pool, stream.device, for_capture) {
    pool.api().record(event_, stream);
  }
  ~RecordedEvent();
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;

  Event event() const { return event_; }

 private:
  RecordedEvent(EventPool& pool, Device device, bool for_capture)
      : pool_(pool),
        for_capture_(for_capture),
        event_(for_capture ? pool.api().create_event(device) : pool.take(device)) {}

  EventPool& pool_;
  const bool for_capture_;
  const Event event_;
};

}  // namespace pycollect::cuda
