// What a group has on its ranks' GPUs once they have met: everybody's slab, how streams signal each
// other, and the runs that are numbered there apart from the host's. One stream of this rank does
// it all; the host enqueues, and nobody's stream waits for what has not been enqueued.
#pragma once
#include <memory>

#include "../plan/select.h"
#include "slab.h"
#include "tracts.h"
#include "watch.h"

namespace pycollect::slabs {

// The deck's part that devices touch, as long as this device may.
class Adopted {
 public:
  Adopted(Gpu& gpu, Device device, const Deck& deck)
      : gpu_(gpu),
        device_(device),
        host_(deck.base()),
        base_(gpu.register_host(device, host_, deck.adopted_bytes())) {}
  ~Adopted();  // gives it back, unless `abandon`ed
  Adopted(const Adopted&) = delete;
  Adopted& operator=(const Adopted&) = delete;
  std::byte* base() const { return base_; }
  void abandon() { abandoned_ = true; }  // the device may still look there

 private:
  Gpu& gpu_;
  const Device device_;
  std::byte *host_, *base_;
  bool abandoned_ = false;
};

class Dock {
 public:
  struct Parts {
    std::shared_ptr<shm::Group> group;
    std::shared_ptr<Gpu> gpu;
    Stream stream;
    Deck deck;
    std::shared_ptr<Tracts> tracts;
    std::unique_ptr<Slab> slab;
    std::unique_ptr<Adopted> adopted;
    std::unique_ptr<Watch> watch;
    bool apart;  // on several GPUs
  };
  explicit Dock(Parts parts);
  ~Dock();  // after `close`
  Dock(const Dock&) = delete;
  Dock& operator=(const Dock&) = delete;

  shm::Group& group() const { return *parts_.group; }
  Gpu& gpu() const { return *parts_.gpu; }
  Stream stream() const { return parts_.stream; }
  const Slab& slab() const { return *parts_.slab; }
  Tracts& tracts() const { return *parts_.tracts; }
  // Of tensors that go through the slabs, and of those that are taken where they are, in tracts.
  Ground ground() const { return parts_.apart ? Ground::slabs_apart : Ground::slabs; }
  Ground open_ground() const { return parts_.apart ? Ground::tracts_apart : Ground::tracts; }
  const std::byte* guard() const { return parts_.adopted->base(); }  // see Launch::guard

  // The next run's number, of the thread that runs the group's calls.
  uint64_t run() const { return run_; }
  void begin_run(uint64_t run) { run_ = run; }

  // Stream memory operations on the ranks' counters, so no host waits for a device and no kernel
  // spins. Behind what is on the stream: signals how far it is; what follows waits until another is
  // there. The latter is enqueued when `r` has enqueued its signal, and throws what Group::await
  // does before that, so that no stream waits for what may never be signalled.
  void tell(uint64_t value);
  void await(Rank r, uint64_t value, const shm::Occasion& occasion);

  // Sees to it that what the stream has now comes to an end, which is what `reached` says. Until
  // then it keeps what was lent to the others.
  std::shared_ptr<Errand> send(const shm::Occasion& occasion, std::function<bool()> reached,
                               std::shared_ptr<void> lent);
  // Lets go of what was lent to calls that have ended, which the next call does otherwise.
  void free_returned() { parts_.watch->free_returned(); }

  // Ends it: gives what is under way some time, and lets go of all memory.
  // Returns the first error that nobody has been told.
  std::exception_ptr close(std::chrono::milliseconds grace);

 private:
  std::byte* word(Rank r) const { return parts_.adopted->base() + parts_.deck.offset(r); }

  Parts parts_;
  std::vector<uint64_t> awaited_;  // [rank]: how far its stream must come for what this one has
  uint64_t run_ = 1;               // counters begin at zero, which is before every run
  bool closed_ = false;
};

}  // namespace pycollect::slabs
