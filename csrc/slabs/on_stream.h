// The medium of GPUs: slots are in everybody's slab, launches on the rank's stream move what is in
// them, and streams wait for each other. See shm/pieces.h, whose steps are the host's.
#pragma once
#include "../shm/pieces.h"
#include "dock.h"

namespace pycollect::slabs {

class OnStream {
 public:
  OnStream(Dock& dock, const shm::Request& request, const shm::Occasion& occasion);

  Rank rank() const { return dock_.slab().rank(); }
  std::size_t slot_bytes() const { return dock_.slab().slot_bytes(); }
  std::byte* slot(Rank r, uint64_t run) const { return dock_.slab().slot(r, run); }
  std::byte* place(Rank r, shm::Where where, uint64_t call) const;

  void settle(uint64_t run, const shm::Occasion& occasion);
  void await(Rank r, uint64_t wanted, const shm::Occasion& occasion) {
    dock_.await(r, wanted, occasion);
  }
  void advance(uint64_t done) { dock_.tell(done, occasion_); }
  void end(uint64_t) {}  // the next run's first word says it

  // One launch, however many tensors the elements are spread over.
  template <class Rows>
  void perform(const shm::Move& move, std::size_t n, const Rows& rows) {
    launch_.rows.clear();
    rows(std::size_t{0}, n);
    // What goes to slots does no harm after an abort; who owns a tensor has been told of it, and
    // may have given its memory away.
    launch_.guard = move.in_slots == move.dsts ? nullptr : dock_.guard();
    dock_.gpu().launch(dock_.stream(), launch_);
  }
  void move(const shm::MoveRow& row);

 private:
  Dock& dock_;
  const shm::Occasion& occasion_;
  Launch launch_;
};

}  // namespace pycollect::slabs
