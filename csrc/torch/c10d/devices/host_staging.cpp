// The last rung, which needs nothing but copies: tensors go to pinned memory behind what is on the
// caller's stream, the executor for host memory works there, and the results go back on a stream of
// the group's own. Whoever waits is held up until the executor is done; what it takes on top of
// that is one copy each way, of whole tensors.
#include <algorithm>

#include "ladder.h"

namespace pycollect::dist {
namespace {

class HostStaging final : public Passage {
 public:
  explicit HostStaging(std::shared_ptr<Devices> devices) : devices_(std::move(devices)) {}

  shm::Span enter(const at::Tensor& tensor, bool reads, bool writes) override;
  void depart() override;
  bool arrived() override;
  void land(const shm::Occasion& occasion) override;
  bool landed() override;
  void join() override;
  void let_go() override;
  const std::vector<at::Device>& on() const override { return on_; }
  Devices& devices() const override { return *devices_; }

 private:
  struct Leg {  // what the call does on one device
    std::vector<Way> out = {}, back = {};
    std::unique_ptr<Mark> left = {}, landed = {};
    bool arrived = false;
  };
  Leg& leg_of(at::Device device);

  const std::shared_ptr<Devices> devices_;
  std::vector<at::Device> on_;
  std::vector<Leg> legs_;  // in the order of on_
};

HostStaging::Leg& HostStaging::leg_of(at::Device device) {
  const auto found = std::find(on_.begin(), on_.end(), device);
  if (found != on_.end()) return legs_[found - on_.begin()];
  on_.push_back(device);
  return legs_.emplace_back();
}

shm::Span HostStaging::enter(const at::Tensor& tensor, bool reads, bool writes) {
  Leg& leg = leg_of(tensor.device());
  if (tensor.numel() == 0) return {nullptr, 0};
  const Way way{tensor, devices_->new_pinned(tensor)};
  if (reads) leg.out.push_back(way);
  if (writes) leg.back.push_back(way);
  return {static_cast<std::byte*>(way.dense.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

void HostStaging::depart() {
  for (std::size_t i = 0; i < legs_.size(); ++i) {
    Leg& leg = legs_[i];
    for (const Way& way : leg.out) devices_->copy_out(way);
    if (!leg.out.empty() || !leg.back.empty()) leg.left = devices_->mark(on_[i]);
    leg.arrived = leg.out.empty();  // nobody on the host waits for what is only overwritten
  }
}

bool HostStaging::arrived() {
  for (Leg& leg : legs_) {
    if (!leg.arrived) leg.arrived = leg.left->reached();
    if (!leg.arrived) return false;
  }
  return true;
}

void HostStaging::land(const shm::Occasion&) {
  for (std::size_t i = 0; i < legs_.size(); ++i)
    if (Leg& leg = legs_[i]; !leg.back.empty()) {
      devices_->follow(on_[i], *leg.left);
      leg.landed = devices_->finish(on_[i], leg.back, {});
    }
  let_go();
}

bool HostStaging::landed() {
  return std::all_of(legs_.begin(), legs_.end(),
                     [](Leg& leg) { return leg.landed == nullptr || leg.landed->reached(); });
}

void HostStaging::join() {
  for (std::size_t i = 0; i < legs_.size(); ++i)
    if (legs_[i].landed) legs_[i].landed->hold_current(on_[i]);
}

void HostStaging::let_go() {
  for (Leg& leg : legs_) {
    leg.out.clear();
    leg.back.clear();
  }
}

}  // namespace

std::shared_ptr<Passage> stage_through_host(std::shared_ptr<Devices> devices) {
  return std::make_shared<HostStaging>(std::move(devices));
}

}  // namespace pycollect::dist
