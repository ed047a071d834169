// How one rank's stream tells the others how far it is, and waits until another's is there: what
// the rungs above host staging differ in. The host has seen to it that whoever is awaited has
// already been told to tell, so no wait of a stream is for something that may never be enqueued.
#pragma once
#include <functional>
#include <memory>

#include "../shm/group.h"
#include "deck.h"

namespace pycollect::slabs {

class Signals {
 public:
  virtual ~Signals() = default;
  // Behind what is on this rank's stream. Others may wait for it when this has returned.
  virtual void tell(uint64_t value, const shm::Occasion& occasion) = 0;
  // What follows on this rank's stream comes after `r` has told it.
  virtual void await(Rank r, uint64_t value) = 0;
};

// Where a rank's signals come from and go to.
struct Station {
  shm::Group& group;
  Gpu& gpu;
  Stream stream;
  const Deck& deck;
  std::byte* adopted;  // the deck, as the device finds it
};

// Stream memory operations on the deck's counters: no host waits, and no kernel spins.
std::unique_ptr<Signals> stream_signals(const Station& station);
// The host waits for the own stream before it tells, and streams never do.
std::unique_ptr<Signals> host_signals(const Station& station);

}  // namespace pycollect::slabs
