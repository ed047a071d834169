#include "events.h"

namespace pycollect::cuda {

EventPool::~EventPool() {
  for (auto& [device, events] : by_device_)
    for (Event event : events.idle) api_.destroy(event);
}

Event EventPool::take(Device device) {
  {
    const std::lock_guard lock(mutex_);
    DeviceEvents& events = by_device_[device];
    if (!events.idle.empty()) {
      const Event event = events.idle.back();
      events.idle.pop_back();
      return event;
    }
    events.idle.reserve(++events.created);  // so that `give_back` cannot fail
  }
  return api_.create_event(device);
}

void EventPool::give_back(Event event) noexcept {
  const std::lock_guard lock(mutex_);
  by_device_.find(event.device)->second.idle.push_back(event);
}

Event RunEvents::take(Device device) {
  taken_.reserve(taken_.size() + 1);  // push_back must not fail and lose an event
  taken_.push_back(for_capture_ ? pool_.api().create_event(device) : pool_.take(device));
  return taken_.back();
}

RunEvents::~RunEvents() {
  for (Event event : taken_)
    if (for_capture_)
      pool_.api().destroy(event);
    else
      pool_.give_back(event);
}

}  // namespace pycollect::cuda
