// The ways in which a group can serve tensors on devices, the fastest first; the last works
// wherever CUDA does. Which one it is, the ranks find out together at their first such call.
// PYCOLLECT_CUDA_SYNC names one, which then must work.
#pragma once
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "../../../slabs/meeting.h"
#include "../../../slabs/tracts.h"
#include "../../arguments.h"
#include "passage.h"

namespace pycollect::dist {

// Copies to and from pinned memory around the executor for host memory (host_staging.cpp).
std::shared_ptr<Passage> stage_through_host(std::shared_ptr<Devices> devices);
// To and from the slabs of the group's GPUs, without the host (slab_passage.cpp).
std::shared_ptr<Passage> pass_through_slabs(std::shared_ptr<Devices> devices,
                                            std::shared_ptr<slabs::Dock> dock);

inline constexpr const char* kBestRung = "best";
std::vector<const char*> rung_names();
// "best" or the name of one; throws std::invalid_argument, which lists them.
void check_rung(const std::string& name);

class Ladder {
 public:
  struct Terms {
    std::string rung;
    std::size_t slot_bytes;  // of a slab
  };
  Ladder(std::shared_ptr<Devices> devices, Terms terms);

  // Once, as soon as there is a group: it may then have GPU memory that others reach.
  void allot(const shm::Group& group);
  // null: this build has no CUDA.
  const std::shared_ptr<slabs::Tracts>& tracts() const { return tracts_; }
  // Are tensors on that device made there?
  bool lends(at::Device device) const {
    return tracts_ && (device.is_cuda() || devices_->has(device));
  }
  // So many elements there. Throws std::invalid_argument where there is no such memory, or under
  // capture.
  at::Tensor empty(at::Device device, int64_t count, at::ScalarType type);
  // Of the memory that they lie in; nothing where there is none. May wait for a device.
  std::optional<slabs::Tracts::Use> use();
  // Would tensors on that device gain by lying there, as far as is known?
  bool is_worth_reaching(at::Device device);

  // Must the ranks meet before the first collective of tensors on devices, and have not?
  bool is_to_meet();
  // Finds out, with all ranks, how their GPUs reach each other. Throws what slabs::meet does.
  void meet(const std::shared_ptr<shm::Group>& group, at::Device device,
            const shm::Occasion& occasion);
  // For one collective of tensors on devices. Throws CollectiveError, on all ranks alike, where the
  // rung that was named does not work.
  std::shared_ptr<Passage> begin();
  const std::shared_ptr<Devices>& devices() const { return devices_; }
  // Frees what it has on devices; gives what is under way there some time. Returns the first error
  // of a call there that nobody has been told.
  std::exception_ptr close(std::chrono::milliseconds grace);
  // Behind that: lets go of the others' memory and frees its own.
  void leave();

 private:
  void free_returned();  // what calls that have ended were lent

  const std::shared_ptr<Devices> devices_;
  const Terms terms_;
  std::shared_ptr<slabs::Tracts> tracts_;
  std::mutex closing_;  // who closes it second finds it closed
  std::mutex mutex_;    // of what follows
  bool met_ = false, said_ = false;
  std::string failed_;                 // why the rung that was named does not work
  std::shared_ptr<slabs::Dock> dock_;  // null: through the host
};

// Throws when the calling thread captures what would have to wait for these results.
void check_no_capture(const Passage& passage, const char* operation);

}  // namespace pycollect::dist
