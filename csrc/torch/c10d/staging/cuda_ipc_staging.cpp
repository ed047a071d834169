// The stream-ordered CUDA IPC transport uses tensors in place, on the group's stream, which waits
// for the caller's. Tensors that are not contiguous, or are on another device, go through a
// contiguous copy. The host waits for no device. Memory that peers access in place is not reused
// before they are done.
#include <algorithm>

#include "../../../cuda_ipc/transport.h"
#include "transport_selector.h"

namespace pycollect::dist {
namespace {

class CudaIpcStaging final : public TensorStaging {
 public:
  CudaIpcStaging(std::shared_ptr<GroupDevices> devices,
                 std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator)
      : devices_(std::move(devices)),
        communicator_(std::move(communicator)),
        transport_(communicator_) {}

  shm::BufferSegment add_tensor(const at::Tensor& tensor, bool reads, bool writes) override;
  void begin_copy_in() override;
  bool inputs_ready() override;
  void begin_copy_out(const shm::OpContext& context) override { send(context, back_); }
  void abort_copies(const shm::OpContext& context) override { send(context, {}); }
  bool outputs_ready() override { return pending_->ended(); }
  std::exception_ptr failure() const override { return pending_ ? pending_->report() : nullptr; }
  void wait_on_current_streams() override;
  void release() override;
  shm::Transport* transport() override { return &transport_; }
  const std::vector<at::Device>& on() const override { return on_; }
  GroupDevices& devices() const override { return *devices_; }

 private:
  void visit(at::Device device);
  void send(const shm::OpContext& context, const std::vector<CopyPair>& back);
  std::shared_ptr<void> exposed() const;
  // torch's name for the staging buffer's device, that of the group's first device tensor.
  at::Device home() const;

  const std::shared_ptr<GroupDevices> devices_;
  const std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator_;
  cuda_ipc::CudaIpcTransport transport_;
  std::vector<at::Device> on_;
  std::vector<at::Tensor> kept_;  // tensors that the executor accesses
  std::vector<CopyPair> out_, back_;
  std::vector<std::unique_ptr<DeviceEvent>> left_;  // [i]: a mark on device on_[i]
  std::shared_ptr<DeviceEvent> end_;
  std::shared_ptr<cuda_ipc::PendingWork> pending_;
};

at::Device CudaIpcStaging::home() const {
  return {on_[0].type(), static_cast<c10::DeviceIndex>(communicator_->stream().device)};
}

void CudaIpcStaging::visit(at::Device device) {
  if (std::find(on_.begin(), on_.end(), device) == on_.end()) on_.push_back(device);
}

// A copy is allocated for the caller's stream on that device; earlier work there may still use it.
shm::BufferSegment CudaIpcStaging::add_tensor(const at::Tensor& tensor, bool reads, bool writes) {
  visit(tensor.device());
  if (tensor.numel() == 0) return {nullptr, 0};
  const at::Device staging_buffer = home();
  at::Tensor found = tensor;
  if (!tensor.is_contiguous() || tensor.device() != staging_buffer) {
    visit(staging_buffer);
    found = devices_->new_dense(tensor, staging_buffer);
    if (reads) out_.push_back({tensor, found});
    if (writes) back_.push_back({tensor, found});
  }
  kept_.push_back(found);
  // Not mutable_data_ptr: a tensor that is only read must not count as written.
  auto* const at = static_cast<std::byte*>(const_cast<void*>(found.const_data_ptr()));
  return {writes ? static_cast<std::byte*>(found.mutable_data_ptr()) : at,
          static_cast<std::size_t>(tensor.numel())};
}

void CudaIpcStaging::begin_copy_in() {
  for (const CopyPair& way : out_) devices_->copy_out(way);
  for (at::Device d : on_) left_.push_back(devices_->mark(d));
}

// Makes the group's stream, not the host, wait for the caller's.
bool CudaIpcStaging::inputs_ready() {
  for (std::size_t i = 0; i < left_.size(); ++i) devices_->wait_for(home(), *left_[i]);
  left_.clear();
  return true;
}

// Returns the tensors in symmetric memory. Peers may access them even if the call has failed.
std::shared_ptr<void> CudaIpcStaging::exposed() const {
  auto found = std::make_shared<std::vector<at::Tensor>>();
  for (const at::Tensor& t : kept_)
    if (communicator_->symmetric_memory().offset_of(
            static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()))
      found->push_back(t);
  if (found->empty()) return {};
  return found;
}

void CudaIpcStaging::send(const shm::OpContext& context, const std::vector<CopyPair>& back) {
  std::shared_ptr<void> exposed = this->exposed();
  try {
    end_ = devices_->finish(home(), back, kept_);
    pending_ = communicator_->watch(context, [end = end_] { return end->reached(); }, exposed);
  } catch (...) {
    cuda_ipc::leak(std::move(exposed));
    throw;
  }
  release();
}

// Includes devices other than the staging buffer's, whose tensors are copied back at the end.
void CudaIpcStaging::wait_on_current_streams() {
  for (at::Device d : on_) end_->hold_current(d);
  communicator_->free_returned();
}

void CudaIpcStaging::release() {
  kept_.clear();
  out_.clear();
  back_.clear();
}

}  // namespace

std::shared_ptr<TensorStaging> stage_through_cuda_ipc(
    std::shared_ptr<GroupDevices> devices,
    std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator) {
  return std::make_shared<CudaIpcStaging>(std::move(devices), std::move(communicator));
}

}  // namespace pycollect::dist
