// See parcels.h: what is remembered of peers, and what must outlive a message.
#include "parcels.h"

#include <algorithm>
#include <random>
#include <thread>

#include "../../../plan/error.h"
#include "../../job.h"
#include "parcel.h"

namespace pycollect::dist {
namespace {

constexpr std::chrono::milliseconds kGlance{1};

}  // namespace

Parcels::Parcels(std::shared_ptr<shm::Group> group, std::shared_ptr<const Ladder> ladder)
    : group_(std::move(group)),
      ladder_(std::move(ladder)),
      devices_(ladder_->devices()->twin()),
      stamp_(uint64_t{std::random_device()()} << 32 | std::random_device()()) {}

std::shared_ptr<slabs::Depot> Parcels::depot() {
  const std::lock_guard lock(mutex_);
  if (!depot_) depot_ = std::make_shared<slabs::Depot>(ladder_->tracts(), ladder_->slot_bytes());
  return depot_;
}

std::shared_ptr<Parcel> Parcels::outgoing(const std::shared_ptr<Parcels>& self,
                                          const at::Tensor& tensor, Rank to) {
  if (!takes_any() || tensor.nbytes() < kLeastBytes || has(refusing_, to)) return nullptr;
  say_way();
  sweep();
  const bool confirmed = has(confirmed_, to);
  if (confirmed && tensor.is_contiguous()) {
    auto* const at = static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
    if (const auto place = ladder_->tracts()->place_of(at, tensor.nbytes()))
      return std::make_shared<OutParcel>(
          self, OutParcel::Terms{to, {at, *place}, true, tensor.nbytes(), 0});
  }
  const std::size_t part = std::min(tensor.nbytes(), most());
  const auto block = depot()->take(number(tensor.device()), OutParcel::kHeadBytes + part);
  if (!block) return nullptr;
  return std::make_shared<OutParcel>(
      self, OutParcel::Terms{to, *block, false, part, confirmed ? 0 : new_stamp()});
}

std::shared_ptr<Parcel> Parcels::incoming(const std::shared_ptr<Parcels>& self,
                                          const at::Tensor& tensor) {
  if (!takes_any() || tensor.nbytes() < kLeastBytes) return nullptr;
  say_way();
  return std::make_shared<InParcel>(self);
}

std::size_t Parcels::most() { return depot()->most() - OutParcel::kHeadBytes; }

// Never zero, which is none.
uint64_t Parcels::new_stamp() {
  const std::lock_guard lock(mutex_);
  return ++stamp_ == 0 ? ++stamp_ : stamp_;
}

void Parcels::require_there(Rank peer, const shm::Occasion& occasion) {
  group_->require_whole(occasion);
  if ((group_->dead() >> peer & 1) != 0 || group_->line(peer).left.load() != 0)
    group_->await([] { return false; }, [&] { return std::vector<Rank>{peer}; }, occasion);
}

void Parcels::say_way() {
  say_once(text("messages of CUDA tensors, from ", kLeastBytes >> 10,
                " KiB on: through GPU memory that the receiver opens, ordered by the hosts; wait() "
                "blocks the host until the receiver has copied"));
}

void Parcels::say(Rank from, Rank to, const std::string& why) const {
  say_once(text("messages of CUDA tensors from rank ", from, " to rank ", to, " of group '",
                group_->settings().name, "' go through pinned memory: ", why));
}

void Parcels::say_vain(Rank from, const std::string& why) {
  add(vain_, from);
  say(from, group_->rank(), why);
}

void Parcels::refused_by(Rank to) {
  add(refusing_, to);
  say(group_->rank(), to, "the receiver cannot open GPU memory of the sender's");
}

void Parcels::let_linger(Lingering what) {
  const std::lock_guard lock(mutex_);
  lingering_.push_back(std::move(what));
}

bool Parcels::sweep() {
  std::vector<Lingering> over;  // let go of without the lock
  const std::lock_guard lock(mutex_);
  std::erase_if(lingering_, [&](Lingering& it) {
    try {
      if (!it.until->reached()) return false;
      if (it.block) depot_->give_back(*it.block);
    } catch (...) {  // a device that has failed does nothing more
    }
    over.push_back(std::move(it));
    return true;
  });
  return lingering_.empty();
}

bool Parcels::close(shm::Deadline deadline) {
  bool ended = sweep();
  while (!ended && shm::Clock::now() < deadline) {
    std::this_thread::sleep_for(kGlance);
    ended = sweep();
  }
  const std::lock_guard lock(mutex_);
  if (depot_) depot_->close();
  if (!ended) new auto(std::move(lingering_));  // devices may still write there
  return ended;
}

}  // namespace pycollect::dist
