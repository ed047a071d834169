// A rank's part of its GPU's memory that other processes reach, and theirs: two slots by turns, and
// in front of them some bytes to try it with. An allocation by itself, which can be handed to other
// processes whatever the allocator of the tensors is.
#pragma once
#include <vector>

#include "deck.h"

namespace pycollect::slabs {

struct SlabTerms {
  Device device;
  Rank rank;
  int world;
  std::size_t slot_bytes;
};

class Slab {
 public:
  // Of the trial: from each rank, from this one, and what it has read of each.
  static constexpr std::size_t kMarkBytes = 16;  // one access of a thread

  Slab(Gpu& gpu, const SlabTerms& terms);
  // Unmaps it, unless it was `abandon`ed. Whoever has this rank's open keeps that memory.
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  Handle handle() { return gpu_.handle_of(terms_.device, memory_[terms_.rank]); }
  void open(Rank r, const Handle& handle);
  // The device may still have to do with it: all of it stays until the process ends.
  void abandon() { abandoned_ = true; }

  Device device() const { return terms_.device; }
  Rank rank() const { return terms_.rank; }
  int world() const { return terms_.world; }
  std::size_t slot_bytes() const { return terms_.slot_bytes; }
  std::byte* slot(Rank r, uint64_t run) const {
    return memory_[r] + kHead + (run & 1) * terms_.slot_bytes;
  }
  std::byte* mark(Rank of, int number) const { return memory_[of] + number * kMarkBytes; }

 private:
  // A page: 2 marks for each of the most ranks there are, and one of its own.
  static constexpr std::size_t kHead = 4096;
  static_assert((2 * shm::kMostRanks + 1) * kMarkBytes <= kHead);

  Gpu& gpu_;
  const SlabTerms terms_;
  std::vector<std::byte*> memory_;  // [rank]; null where it is not open
  bool abandoned_ = false;
};

}  // namespace pycollect::slabs
