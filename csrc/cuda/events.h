// Events, made once per device and used again. CUDA's waits keep what an event stood for when they
// were issued, so an event may be recorded again as soon as the run that used it has issued all of
// its waits, however far the devices are.
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

  Event take(Device device);  // which must be current
  void give_back(Event event) noexcept;
  Api& api() const { return api_; }

 private:
  struct DeviceEvents {
    std::vector<Event> idle = {};  // events that no run records or waits for any more
    std::size_t made = 0;
  };
  Api& api_;
  std::mutex mutex_;
  std::map<Device, DeviceEvents> by_device_;
};

// Events for one run, none of them twice. A graph keeps to itself what was used while it was
// captured, so those are made for it alone.
class EventLease {
 public:
  EventLease(EventPool& pool, bool for_capture) : pool_(pool), for_capture_(for_capture) {}
  ~EventLease();
  EventLease(const EventLease&) = delete;
  EventLease& operator=(const EventLease&) = delete;

  Event take(Device device);  // which must be current

 private:
  EventPool& pool_;
  const bool for_capture_;
  std::vector<Event> taken_;
};

}  // namespace pycollect::cuda
