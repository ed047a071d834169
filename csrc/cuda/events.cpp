#include "events.h"

namespace pycollect::cuda {

EventPool::~EventPool() {
  for (auto& [device, shelf] : by_device_)
    for (Event event : shelf.idle) api_.destroy(event);
}

Event EventPool::take(Device device) {
  {
    const std::lock_guard lock(mutex_);
    DeviceEvents& shelf = by_device_[device];
    if (!shelf.idle.empty()) {
      const Event event = shelf.idle.back();
      shelf.idle.pop_back();
      return event;
    }
    shelf.idle.reserve(++shelf.made);  // so that giving back cannot fail
  }
  return api_.create_event(device);
}

void EventPool::give_back(Event event) noexcept {
  const std::lock_guard lock(mutex_);
  by_device_.find(event.device)->second.idle.push_back(event);
}

Event EventLease::take(Device device) {
  taken_.reserve(taken_.size() + 1);  // nothing may fail between taking and noting
  taken_.push_back(for_capture_ ? pool_.api().create_event(device) : pool_.take(device));
  return taken_.back();
}

EventLease::~EventLease() {
  for (Event event : taken_)
    if (for_capture_)
      pool_.api().destroy(event);
    else
      pool_.give_back(event);
}

}  // namespace pycollect::cuda
