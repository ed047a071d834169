// See ladder.h. The one list of rungs.
#include "ladder.h"

#include <array>

#include "../../../plan/error.h"
#include "../../../plan/names.h"
#include "../../../shm/executor.h"
#include "../../job.h"
#include "../call.h"

namespace pycollect::dist {
namespace {

struct Rung {
  const char* name;
  const char* what;  // it does: said once in the log
};

constexpr std::array kRungs{
    Rung{"stream",
         "through slabs that all processes reach, ordered by stream memory operations; wait() "
         "blocks the stream only"},
    Rung{"host",
         "copied to pinned memory and back around the exchange between processes; wait() blocks "
         "the host until the ranks have exchanged, then only the stream"},
};
constexpr const Rung& kStream = kRungs[0];
constexpr const Rung& kHost = kRungs[1];

void say_rung(const Rung& rung) {
  say_once(text("collectives of CUDA tensors, PYCOLLECT_CUDA_SYNC=", rung.name, ": ", rung.what));
}

}  // namespace

std::vector<const char*> rung_names() {
  std::vector<const char*> names{kBestRung};
  for (const Rung& r : kRungs) names.push_back(r.name);
  return names;
}

void check_rung(const std::string& name) { find_name("cuda_sync", name, rung_names()); }

Ladder::Ladder(std::shared_ptr<Devices> devices, Terms terms)
    : devices_(std::move(devices)), terms_(std::move(terms)) {
  check_rung(terms_.rung);
  met_ = terms_.rung == kHost.name || (terms_.rung == kBestRung && !devices_->gpu());
}

void Ladder::allot(const shm::Group& group) {
  if (const auto gpu = devices_->gpu()) tracts_ = std::make_shared<slabs::Tracts>(gpu, group);
}

bool Ladder::is_worth_reaching(at::Device device) {
  const std::lock_guard lock(mutex_);
  return lends(device) && (!met_ || dock_);
}

at::Tensor Ladder::empty(at::Device device, int64_t count, at::ScalarType type) {
  require(lends(device), "allocate_tensor: a tensor on ", device,
          " cannot lie in memory that processes share: this build has no CUDA part");
  require(!devices_->is_capturing(device), "allocate_tensor: the current stream of ", device,
          " is under capture, and a graph cannot own memory that other processes reach; make the "
          "tensor before the capture");
  free_returned();
  const at::Tensor made = devices_->new_in_tract(tracts_, device, count, type);
  for (const std::string& why : tracts_->unreachable()) say_once(why);
  return made;
}

std::optional<slabs::Tracts::Use> Ladder::use() {
  if (!tracts_) return {};
  free_returned();
  return tracts_->use();
}

void Ladder::free_returned() {
  std::unique_lock lock(mutex_);
  const auto dock = dock_;
  lock.unlock();
  if (dock) dock->free_returned();
}

void Ladder::leave() {
  devices_->drop_pools();
  if (tracts_) tracts_->close();
}

bool Ladder::is_to_meet() {
  const std::lock_guard lock(mutex_);
  return !met_;
}

std::shared_ptr<Passage> Ladder::begin() {
  std::unique_lock lock(mutex_);
  if (!failed_.empty()) throw CollectiveError(failed_);
  const std::shared_ptr<slabs::Dock> dock = dock_;
  const bool says = met_ && !std::exchange(said_, met_);
  lock.unlock();
  if (says) say_rung(dock ? kStream : kHost);
  return dock ? pass_through_slabs(devices_, dock) : stage_through_host(devices_);
}

void Ladder::meet(const std::shared_ptr<shm::Group>& group, at::Device device,
                  const shm::Occasion& occasion) {
  slabs::Found found{{}, "this build has no CUDA"};
  if (const auto gpu = devices_->gpu()) {
    found =
        slabs::meet({group, gpu, tracts_, devices_->stream(device), terms_.slot_bytes}, occasion);
    for (const std::string& why : tracts_->unreachable()) say_once(why);
  }
  std::string failed;
  if (!found.dock) {
    const std::string said =
        text("PYCOLLECT_CUDA_SYNC=", kStream.name, " does not work here: ", found.why);
    say_once(text("collectives of CUDA tensors: ", said));
    if (terms_.rung == kStream.name) failed = text(occasion.operation, ": ", said);
  }
  const std::lock_guard lock(mutex_);
  failed_ = failed;
  dock_ = found.dock;
  met_ = true;
}

std::exception_ptr Ladder::close(std::chrono::milliseconds grace) {
  const std::lock_guard closing(closing_);
  std::shared_ptr<slabs::Dock> dock;
  {
    const std::lock_guard lock(mutex_);
    dock.swap(dock_);
  }
  return dock ? dock->close(grace) : nullptr;
}

void check_no_capture(const Passage& passage, const char* operation) {
  for (at::Device d : passage.on())
    require(!passage.devices().is_capturing(d), operation,
            ": wait() was called while the current "
            "stream of ",
            d, " is under capture; wait before the capture begins");
}

}  // namespace pycollect::dist
