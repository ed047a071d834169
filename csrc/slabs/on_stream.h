// The medium of GPUs: slots are in everybody's slab, tensors perhaps in everybody's tracts,
// launches on the rank's stream move what is in them, and streams wait for each other. See
// shm/pieces.h, whose steps are the host's.
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
  std::byte* place(Rank r, shm::Where where, uint64_t) const { return reached_[index(r, where)]; }
  // Before anything of a script is enqueued that takes others' tensors where they are: opens what
  // was not open yet. Throws CollectiveError, and breaks the group, when that fails.
  void reach(const shm::Script& open);

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
  static std::size_t index(Rank r, shm::Where where) {
    return 2 * static_cast<std::size_t>(r) + (where == shm::Where::output);
  }
  std::byte* find(Rank r, shm::Where where) const;

  Dock& dock_;
  const shm::Occasion& occasion_;
  Launch launch_;
  std::vector<std::byte*> reached_;  // [rank][where]: others' tensors, as this device finds them
};

}  // namespace pycollect::slabs
