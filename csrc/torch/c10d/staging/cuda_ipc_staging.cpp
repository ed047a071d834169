// Staging for the CUDA IPC transport, which uses tensors in place, on the group's stream, which
// waits for the caller's. Tensors that are not contiguous, or are on another device, go through a
// contiguous copy. The host waits for no device. Memory that peers access in place is not reused
// before they are done.
#include <algorithm>

#include "../../../cuda_ipc/transport.h"
#include "transport_selector.h"

namespace pycollect::dist {
namespace {

class CudaIpcStaging final : public TensorStaging {
 public:
  CudaIpcStaging(std::shared_ptr<DeviceOps> devices,
                 std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator)
      : devices_(std::move(devices)),
        communicator_(std::move(communicator)),
        transport_(communicator_) {}

  ipc::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
  void begin_copy_in() override;
  bool inputs_ready() override;
  void begin_copy_out(const ipc::OpContext& context) override { finish(context, out_); }
  void abort_copies(const ipc::OpContext& context) override;
  bool outputs_ready() override { return pending_->ended(); }
  std::exception_ptr failure() const override { return pending_ ? pending_->report() : nullptr; }
  void wait_on_current_streams() override;
  void release() override;
  ipc::Transport* transport() override { return &transport_; }
  const std::vector<at::Device>& on() const override { return on_; }
  DeviceOps& devices() const override { return *devices_; }

 private:
  void add_device(at::Device device);
  void finish(const ipc::OpContext& context, const std::vector<CopyPair>& copies_out);
  std::shared_ptr<void> symmetric_tensors() const;
  // Device of the staging buffer: that of the group's first device tensor.
  at::Device staging_device() const;

  const std::shared_ptr<DeviceOps> devices_;
  const std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator_;
  cuda_ipc::CudaIpcTransport transport_;
  std::vector<at::Device> on_;
  std::vector<at::Tensor> kept_;  // tensors that the executor accesses
  std::vector<CopyPair> in_, out_;
  std::vector<std::unique_ptr<DeviceEvent>> copied_in_;  // [i]: on the caller's stream of on_[i]
  std::shared_ptr<DeviceEvent> end_;
  std::shared_ptr<cuda_ipc::PendingWork> pending_;
};

at::Device CudaIpcStaging::staging_device() const {
  return {on_[0].type(), static_cast<c10::DeviceIndex>(communicator_->stream().device)};
}

void CudaIpcStaging::add_device(at::Device device) {
  if (std::find(on_.begin(), on_.end(), device) == on_.end()) on_.push_back(device);
}

// The memory of a copy is allocated for the caller's stream on its device: earlier work there may
// still use it.
ipc::BufferSegment CudaIpcStaging::add_tensor(const at::Tensor& tensor, bool reads, bool writes) {
  add_device(tensor.device());
  if (tensor.numel() == 0) return {nullptr, 0};
  const at::Device device = staging_device();
  at::Tensor found = tensor;
  if (!tensor.is_contiguous() || tensor.device() != device) {
    add_device(device);
    found = devices_->new_dense(tensor, device);
    if (reads) in_.push_back({tensor, found});
    if (writes) out_.push_back({tensor, found});
  }
  kept_.push_back(found);
  // mutable_data_ptr() would copy a lazy clone, which a call that only reads must not do.
  auto* const at = static_cast<std::byte*>(const_cast<void*>(found.const_data_ptr()));
  return {writes ? static_cast<std::byte*>(found.mutable_data_ptr()) : at,
          static_cast<std::size_t>(tensor.numel())};
}

void CudaIpcStaging::begin_copy_in() {
  for (const CopyPair& pair : in_) devices_->copy_in(pair);
  for (at::Device d : on_) copied_in_.push_back(devices_->record_event(d));
}

// Makes the group's stream, not the host, wait for the caller's.
bool CudaIpcStaging::inputs_ready() {
  for (std::size_t i = 0; i < copied_in_.size(); ++i)
    devices_->wait_for(staging_device(), *copied_in_[i]);
  copied_in_.clear();
  return true;
}

// Returns the tensors in symmetric memory. Peers may access them even if the call has failed.
std::shared_ptr<void> CudaIpcStaging::symmetric_tensors() const {
  auto found = std::make_shared<std::vector<at::Tensor>>();
  for (const at::Tensor& t : kept_)
    if (communicator_->symmetric_memory().offset_of(
            static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()))
      found->push_back(t);
  if (found->empty()) return {};
  return found;
}

void CudaIpcStaging::finish(const ipc::OpContext& context,
                            const std::vector<CopyPair>& copies_out) {
  std::shared_ptr<void> symmetric = symmetric_tensors();
  try {
    end_ = devices_->finish(staging_device(), copies_out, kept_);
  } catch (...) {
    communicator_->end_call(std::current_exception());
    cuda_ipc::leak(std::move(symmetric));
    throw;
  }
  pending_ = communicator_->end_call(context, [end = end_] { return end->reached(); }, symmetric);
  release();
}

// In a group that has failed, peers may still launch accesses to exposed memory, whatever this
// rank's stream has done.
void CudaIpcStaging::abort_copies(const ipc::OpContext& context) {
  if (!communicator_->group().is_healthy()) cuda_ipc::leak(symmetric_tensors());
  finish(context, {});
}

// Includes the devices whose tensors are copied from the staging buffer's device at the end.
void CudaIpcStaging::wait_on_current_streams() {
  for (at::Device d : on_) end_->block_current(d);
  communicator_->free_returned();
}

void CudaIpcStaging::release() {
  kept_.clear();
  in_.clear();
  out_.clear();
}

}  // namespace

std::shared_ptr<TensorStaging> stage_through_cuda_ipc(
    std::shared_ptr<DeviceOps> devices,
    std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator) {
  return std::make_shared<CudaIpcStaging>(std::move(devices), std::move(communicator));
}

}  // namespace pycollect::dist
