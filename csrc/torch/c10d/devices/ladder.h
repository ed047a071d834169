// The ways in which a group can serve tensors on devices, the fastest first; the last works
// wherever CUDA does. Which one it is, the ranks find out together at their first such call.
// PYCOLLECT_CUDA_SYNC names one, which then must work.
#pragma once
#include <functional>
#include <mutex>
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

struct Call;

inline constexpr const char* kBestRung = "best";
std::vector<const char*> rung_names();
// "best" or the name of one; throws std::invalid_argument, which lists them.
void check_rung(const std::string& name);

// What a meeting of all ranks has ended with: all of them raise it, and none has to tell.
struct Unmet {
  std::exception_ptr error;
};

class Ladder {
 public:
  struct Terms {
    std::string rung;
    std::size_t slot_bytes;  // of a slab
    // Collectives of no more than this go through the host whatever works, and nobody meets for
    // them.
    std::size_t host_bytes = 0;
  };
  Ladder(std::shared_ptr<Devices> devices, Terms terms);

  bool serves(const at::Tensor& tensor) const { return devices_->serves(tensor); }
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
  // Would tensors on that device gain by lying there, as far as is known?
  bool is_worth_reaching(at::Device device);

  // Throws while the current stream of the tensor's device is under capture.
  void check_no_capture(const at::Tensor& tensor, const Label& label) const;

  // Has all ranks `meet`, in its turn among the group's calls, before one like this.
  using Convene = std::function<void(const Call& like, at::Device device)>;
  void convene_by(Convene convene) { convene_ = std::move(convene); }
  // At once, where the device may need it; else does nothing. Throws as `begin` does.
  void connect(const Call& call, at::Device device);
  // For one collective, the first tensor of which is on `device`. Throws Unmet with what
  // convening throws.
  std::shared_ptr<Passage> begin(const Call& call, at::Device device);
  const std::shared_ptr<Devices>& devices() const { return devices_; }
  bool has_met();
  void meet(const std::shared_ptr<shm::Group>& group, at::Device device,
            const shm::Occasion& occasion);
  // Frees what it has on devices; gives what is under way there some time.
  void close(std::chrono::milliseconds grace);
  // Behind that: lets go of the others' memory and frees its own.
  // `dead`: a bit for each rank that has died.
  void leave(uint64_t dead);

 private:
  std::shared_ptr<Passage> begin_staged() const;
  std::shared_ptr<slabs::Dock> dock_for(const Call& call, at::Device device);
  void settle(const slabs::Found& found, const char* operation);

  const std::shared_ptr<Devices> devices_;
  const Terms terms_;
  std::shared_ptr<slabs::Tracts> tracts_;
  Convene convene_;
  std::mutex closing_;  // who closes it second finds it closed
  std::mutex mutex_;    // of what follows
  bool met_ = false;
  std::string failed_;                 // why the rung that was named does not work
  std::shared_ptr<slabs::Dock> dock_;  // null: through the host
};

// Throws when the calling thread captures what would have to wait for these results.
void check_no_capture(const Passage& passage, const char* operation);

}  // namespace pycollect::dist
