// The rung "wait", for devices whose streams cannot wait for memory: a rank tells when its stream
// has come so far, which takes the host a look at an event for each hand-over.
#include "signals.h"

namespace pycollect::slabs {
namespace {

class HostSignals final : public Signals {
 public:
  explicit HostSignals(const Station& s) : station_(s) {}

  void tell(uint64_t value, const shm::Occasion& occasion) override {
    Gpu& gpu = station_.gpu;
    const Rank me = station_.group.rank();
    const struct Point {  // of the stream
      Gpu& gpu;
      Event event;
      ~Point() {
        try {
          gpu.destroy(event);
        } catch (...) {  // the device is broken, and the next call to it says so
        }
      }
    } point{gpu, gpu.record(station_.stream)};
    station_.group.await([&] { return gpu.reached(point.event); },
                         [&] { return std::vector<Rank>{me}; }, occasion);
    station_.deck.counter(me).reached.store(value, std::memory_order_release);
  }
  void await(Rank, uint64_t) override {}  // it was reached when it was told

 private:
  const Station station_;
};

}  // namespace

std::unique_ptr<Signals> host_signals(const Station& station) {
  return std::make_unique<HostSignals>(station);
}

}  // namespace pycollect::slabs
