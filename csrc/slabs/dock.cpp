#include "dock.h"

namespace pycollect::slabs {
namespace {

// Whom it depends on that `r` enqueues something: on itself, if it is gone, or else on those who
// are behind all others: the rest may only wait for them.
std::vector<Rank> missing(const shm::Group& group, const Deck& deck, Rank r) {
  if ((group.gone() >> r & 1) != 0) return {r};
  std::vector<Rank> last;
  uint64_t least = 0;
  for (Rank other = 0; other < group.world(); ++other) {
    const uint64_t seen = deck.berth(other).enqueued.load(std::memory_order_acquire);
    if (other == group.rank() || (!last.empty() && seen != least && shm::reached(seen, least)))
      continue;
    if (seen != least) last.clear();
    least = seen;
    last.push_back(other);
  }
  return last;
}

}  // namespace

Adopted::~Adopted() {
  if (abandoned_) return;
  try {
    gpu_.unregister_host(device_, host_);
  } catch (...) {  // the device is broken
  }
}

Dock::Dock(Parts parts) : parts_(std::move(parts)), awaited_(parts_.group->world()) {}

Dock::~Dock() = default;

void Dock::tell(uint64_t value) {
  gpu().on(stream().device,
           [&](cuda::Api& api) { api.write_value(stream(), word(group().rank()), value); });
  parts_.deck.berth(group().rank()).enqueued.store(value, std::memory_order_release);
}

void Dock::await(Rank r, uint64_t value, const shm::Occasion& occasion) {
  const std::atomic<uint64_t>& enqueued = parts_.deck.berth(r).enqueued;
  const auto ready = [&] { return shm::reached(enqueued.load(std::memory_order_acquire), value); };
  if (!ready()) group().await(ready, [&] { return missing(group(), parts_.deck, r); }, occasion);
  if (shm::reached(awaited_[r], value)) return;  // counters only grow
  gpu().on(stream().device, [&](cuda::Api& api) { api.wait_value(stream(), word(r), value); });
  awaited_[r] = value;
}

// A stream that was let go comes to its end as well, perhaps before this rank has heard of what was
// wrong, and has written no results: that is no good end, unless it was seen before.
std::shared_ptr<Errand> Dock::send(const shm::Occasion& occasion, std::function<bool()> ended,
                                   std::shared_ptr<void> lent) {
  auto well = std::make_shared<std::atomic<bool>>(false);
  auto reached = [group = parts_.group, deck = parts_.deck, occasion, well,
                  ended = std::move(ended)] {
    if (well->load()) return true;
    if (!ended()) return false;
    if (deck.aborted().load(std::memory_order_acquire) != 0) group->require_whole(occasion);
    well->store(true);
    return true;
  };
  auto errand =
      std::make_shared<Errand>(Errand::About{occasion.operation, occasion.call, occasion.deadline,
                                             std::move(reached), awaited_},
                               std::move(lent));
  parts_.watch->take(errand);
  return errand;
}

std::exception_ptr Dock::close(std::chrono::milliseconds grace) {
  if (std::exchange(closed_, true)) return nullptr;
  std::exception_ptr untold = parts_.watch->close(grace);
  parts_.slab.reset();
  parts_.adopted.reset();
  return untold;
}

}  // namespace pycollect::slabs
