// What a rank does to find out whether memory and counters that were handed over work: small
// launches, and waits, on a stream of their own, each with a time limit.
#pragma once
#include <memory>
#include <vector>

#include "slab.h"

namespace pycollect::slabs {

// Each call throws what is wrong, and ends in time whatever the device does.
class Trial {
 public:
  Trial(Gpu& gpu, const Slab& slab, const Deck& deck, std::byte* adopted);
  ~Trial();
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  void clear();             // the own marks: before others are told of the slab
  void write_everywhere();  // a mark into every slab
  void read_everywhere();   // every slab's mark, and what the others have written into this one
  void tell();              // by a stream, that it has come so far
  void await_everybody();   // by a stream; and one wait that only the host can end
  // Brings what the device was given to an end, however the calls went and whatever a stream waits
  // for; false: it does not come. Once no rank looks at the counters any more.
  bool drain() noexcept;

 private:
  using Found = std::vector<std::byte>;  // a copy of the own marks
  // Behind what is on the stream: act(api).
  template <class F>
  void on_stream(F&& act) {
    gpu_.on(stream_.device, std::forward<F>(act));
  }
  void copy(std::byte* dst, std::byte* src);
  void wait(Rank r, uint64_t value);
  void finish();
  std::byte* word(Rank r) const { return adopted_ + deck_.offset(r); }

  Gpu& gpu_;
  const Slab& slab_;
  const Deck deck_;
  std::byte* const adopted_;
  const Stream stream_;
  std::unique_ptr<Found> found_;
  bool lost_ = false;  // the stream has not come to its end
};

}  // namespace pycollect::slabs
