// The rung "stream". A counter is a word of the memory that the processes share, which the GPU
// writes and polls over its bus, so that the host can release whoever waits with a plain store.
#include <vector>

#include "signals.h"

namespace pycollect::slabs {
namespace {

class StreamSignals final : public Signals {
 public:
  explicit StreamSignals(const Station& s) : station_(s), awaited_(s.group.world()) {}

  void tell(uint64_t value, const shm::Occasion&) override {
    station_.gpu.write(station_.stream, word(station_.group.rank()), value);
  }
  // Counters only grow: who has waited for more has waited for this.
  void await(Rank r, uint64_t value) override {
    if (shm::reached(awaited_[r], value)) return;
    station_.gpu.await(station_.stream, word(r), value);
    awaited_[r] = value;
  }

 private:
  std::byte* word(Rank r) const { return station_.adopted + station_.deck.offset(r); }

  const Station station_;
  std::vector<uint64_t> awaited_;  // [rank]
};

}  // namespace

std::unique_ptr<Signals> stream_signals(const Station& station) {
  return std::make_unique<StreamSignals>(station);
}

}  // namespace pycollect::slabs
