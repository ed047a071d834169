// Host staging, the last transport, needs nothing but copies: tensors are copied to pinned memory
// behind the caller's stream, the host executor runs there, and the results are copied back on a
// stream of the group. wait() blocks until the executor is done. The extra cost is one copy of
// whole tensors in each direction.
#include <algorithm>

#include "transport_selector.h"

namespace pycollect::dist {
namespace {

class HostStaging final : public TensorStaging {
 public:
  explicit HostStaging(std::shared_ptr<GroupDevices> devices) : devices_(std::move(devices)) {}

  shm::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
  void begin_copy_in() override;
  bool inputs_ready() override;
  void begin_copy_out(const shm::OpContext& context) override;
  bool outputs_ready() override;
  void wait_on_current_streams() override;
  void release() override;
  const std::vector<at::Device>& on() const override { return on_; }
  GroupDevices& devices() const override { return *devices_; }

 private:
  struct Leg {  // copies and marks of the call on one device
    std::vector<CopyPair> out = {}, back = {};
    std::unique_ptr<DeviceEvent> left = {}, outputs_ready = {};
    bool inputs_ready = false;
  };
  Leg& leg_of(at::Device device);

  const std::shared_ptr<GroupDevices> devices_;
  std::vector<at::Device> on_;
  std::vector<Leg> legs_;  // in the same order as on_
};

HostStaging::Leg& HostStaging::leg_of(at::Device device) {
  const auto found = std::find(on_.begin(), on_.end(), device);
  if (found != on_.end()) return legs_[found - on_.begin()];
  on_.push_back(device);
  return legs_.emplace_back();
}

shm::BufferSegment HostStaging::add_tensor(const at::Tensor& tensor, bool reads, bool writes) {
  Leg& leg = leg_of(tensor.device());
  if (tensor.numel() == 0) return {nullptr, 0};
  const CopyPair way{tensor, devices_->new_pinned(tensor)};
  if (reads) leg.out.push_back(way);
  if (writes) leg.back.push_back(way);
  return {static_cast<std::byte*>(way.dense.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

void HostStaging::begin_copy_in() {
  for (std::size_t i = 0; i < legs_.size(); ++i) {
    Leg& leg = legs_[i];
    for (const CopyPair& way : leg.out) devices_->copy_out(way);
    if (!leg.out.empty() || !leg.back.empty()) leg.left = devices_->mark(on_[i]);
    leg.inputs_ready = leg.out.empty();  // no host wait for tensors that are only overwritten
  }
}

bool HostStaging::inputs_ready() {
  for (Leg& leg : legs_) {
    if (!leg.inputs_ready) leg.inputs_ready = leg.left->reached();
    if (!leg.inputs_ready) return false;
  }
  return true;
}

void HostStaging::begin_copy_out(const shm::OpContext&) {
  for (std::size_t i = 0; i < legs_.size(); ++i)
    if (Leg& leg = legs_[i]; !leg.back.empty()) {
      devices_->wait_for(on_[i], *leg.left);
      leg.outputs_ready = devices_->finish(on_[i], leg.back, {});
    }
  release();
}

bool HostStaging::outputs_ready() {
  return std::all_of(legs_.begin(), legs_.end(), [](Leg& leg) {
    return leg.outputs_ready == nullptr || leg.outputs_ready->reached();
  });
}

void HostStaging::wait_on_current_streams() {
  for (std::size_t i = 0; i < legs_.size(); ++i)
    if (legs_[i].outputs_ready) legs_[i].outputs_ready->hold_current(on_[i]);
}

void HostStaging::release() {
  for (Leg& leg : legs_) {
    leg.out.clear();
    leg.back.clear();
  }
}

}  // namespace

std::shared_ptr<TensorStaging> stage_through_host(std::shared_ptr<GroupDevices> devices) {
  return std::make_shared<HostStaging>(std::move(devices));
}

}  // namespace pycollect::dist
