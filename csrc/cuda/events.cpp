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

RecordedEvent::~RecordedEvent() {
  if (for_capture_)
    pool_.api().destroy(event_);
  else
    pool_.give_back(event_);
}

}  // namespace pycollect::cuda
