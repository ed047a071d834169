// Host staging, the way of CUDA tensors between processes: tensors are copied to pinned memory on
// the caller's stream, the host executor runs there, and the results are copied back on a stream of
// the group. wait() blocks until the executor is done. The extra cost is one copy of whole tensors
// in each direction.
#include <algorithm>

#include "../../../plan/error.h"
#include "tensor_staging.h"

namespace pycollect::dist {
namespace {

class HostStaging final : public TensorStaging {
 public:
  explicit HostStaging(std::shared_ptr<DeviceOps> devices) : devices_(std::move(devices)) {}

  ipc::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
  void begin_copy_in() override;
  bool inputs_ready() override;
  void begin_copy_out() override;
  bool outputs_ready() override;
  void wait_on_current_streams() override;
  void release() override;
  const std::vector<at::Device>& on() const override { return on_; }
  DeviceOps& devices() const override { return *devices_; }

 private:
  struct DeviceCopies {  // copies and events of the call on one device
    std::vector<CopyPair> in = {}, out = {};
    std::unique_ptr<DeviceEvent> copied_in = {};
    std::shared_ptr<DeviceEvent> outputs_ready = {};
    bool inputs_ready = false;
  };
  DeviceCopies& copies_on(at::Device device);

  const std::shared_ptr<DeviceOps> devices_;
  std::vector<at::Device> on_;
  std::vector<DeviceCopies> copies_;  // in the same order as on_
};

HostStaging::DeviceCopies& HostStaging::copies_on(at::Device device) {
  const auto found = std::find(on_.begin(), on_.end(), device);
  if (found != on_.end()) return copies_[found - on_.begin()];
  on_.push_back(device);
  return copies_.emplace_back();
}

ipc::BufferSegment HostStaging::add_tensor(const at::Tensor& tensor, bool reads, bool writes) {
  DeviceCopies& copies = copies_on(tensor.device());
  if (tensor.numel() == 0) return {nullptr, 0};
  const CopyPair pair{tensor, devices_->new_pinned(tensor)};
  if (reads) copies.in.push_back(pair);
  if (writes) copies.out.push_back(pair);
  return {static_cast<std::byte*>(pair.dense.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

void HostStaging::begin_copy_in() {
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    DeviceCopies& copies = copies_[i];
    for (const CopyPair& pair : copies.in) devices_->torch().copy(pair.dense, pair.tensor);
    if (!copies.in.empty() || !copies.out.empty())
      copies.copied_in = devices_->record_event(on_[i]);
    copies.inputs_ready = copies.in.empty();  // no host wait for tensors that are only overwritten
  }
}

bool HostStaging::inputs_ready() {
  for (DeviceCopies& copies : copies_) {
    if (!copies.inputs_ready) copies.inputs_ready = copies.copied_in->reached();
    if (!copies.inputs_ready) return false;
  }
  return true;
}

void HostStaging::begin_copy_out() {
  for (std::size_t i = 0; i < copies_.size(); ++i)
    if (DeviceCopies& copies = copies_[i]; !copies.out.empty()) {
      devices_->wait_for(on_[i], *copies.copied_in);
      copies.outputs_ready = devices_->finish(on_[i], copies.out, {});
    }
  release();
}

bool HostStaging::outputs_ready() {
  return std::all_of(copies_.begin(), copies_.end(), [](DeviceCopies& copies) {
    return copies.outputs_ready == nullptr || copies.outputs_ready->reached();
  });
}

void HostStaging::wait_on_current_streams() {
  for (std::size_t i = 0; i < copies_.size(); ++i)
    if (copies_[i].outputs_ready) copies_[i].outputs_ready->block_current(on_[i]);
}

void HostStaging::release() {
  for (DeviceCopies& copies : copies_) {
    copies.in.clear();
    copies.out.clear();
  }
}

}  // namespace

std::shared_ptr<TensorStaging> stage_through_host(std::shared_ptr<DeviceOps> devices) {
  return std::make_shared<HostStaging>(std::move(devices));
}

void check_no_capture(const TensorStaging& staging, const char* operation) {
  for (at::Device d : staging.on())
    require(!staging.devices().is_capturing(d), operation,
            ": wait() was called while the current stream of ", d,
            " is under capture; wait before the capture begins");
}

}  // namespace pycollect::dist
