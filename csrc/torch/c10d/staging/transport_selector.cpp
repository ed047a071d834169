// See transport_selector.h. This file has the only list of transports.
#include "transport_selector.h"

#include <array>

#include "../../../plan/error.h"
#include "../../../plan/find_name.h"
#include "../../../rank_executor/executor.h"
#include "../../log.h"
#include "../call.h"

namespace pycollect::dist {
namespace {

struct TransportOption {
  const char* name;
  const char* description;  // logged once
};

constexpr std::array kTransports{
    TransportOption{
        "cuda_ipc",
        "through GPU memory shared by CUDA IPC, ordered by stream memory operations; wait() "
        "blocks the stream only"},
    TransportOption{
        "host_staging",
        "copied to pinned memory and back around the exchange between processes; wait() blocks "
        "the host until the ranks have exchanged, then only the stream"},
};
constexpr const TransportOption& kCudaIpc = kTransports[0];
constexpr const TransportOption& kHostStaging = kTransports[1];

void log_transport(const TransportOption& transport) {
  log_once(text("collectives of CUDA tensors, PYCOLLECT_CUDA_TRANSPORT=", transport.name, ": ",
                transport.description));
}

}  // namespace

std::vector<const char*> transport_names() {
  std::vector<const char*> names{kAutoTransport};
  for (const TransportOption& r : kTransports) names.push_back(r.name);
  return names;
}

void check_transport(const std::string& name) {
  find_name("cuda_transport", name, transport_names());
}

TransportSelector::TransportSelector(std::shared_ptr<DeviceOps> devices, TransportSettings settings)
    : devices_(std::move(devices)), settings_(std::move(settings)) {
  check_transport(settings_.transport);
  rendezvous_done_ = settings_.transport == kHostStaging.name ||
                     (settings_.transport == kAutoTransport && !devices_->gpu());
}

void TransportSelector::use_host_staging() {
  const std::lock_guard lock(mutex_);
  rendezvous_done_ = true;
  if (settings_.transport == kCudaIpc.name)
    failed_ = text("cuda_transport='", kCudaIpc.name, "' works within one host only, and the ",
                   "ranks of the group are on several; pass '", kHostStaging.name, "'");
}

void TransportSelector::attach(const ipc::Group& group) {
  if (const auto gpu = devices_->gpu())
    symmetric_memory_ = std::make_shared<cuda_ipc::SymmetricMemory>(gpu, group);
}

bool TransportSelector::benefits_from_symmetric_memory(at::Device device) {
  const std::lock_guard lock(mutex_);
  return serves_symmetric(device) && (!rendezvous_done_ || communicator_);
}

at::Tensor TransportSelector::empty(at::Device device, int64_t count, at::ScalarType type) {
  require(
      serves_symmetric(device), "allocate_tensor: a tensor on ", device,
      " cannot lie in memory that processes share: this build has no CUDA part; pass device='cpu'");
  require(
      !devices_->is_capturing(device), "allocate_tensor: the current stream of ", device,
      " is under capture, and a graph cannot own memory that other processes reach; allocate the "
      "tensor before the capture");
  free_returned();
  const at::Tensor made = devices_->new_symmetric(symmetric_memory_, device, count, type);
  for (const std::string& why : symmetric_memory_->unreachable()) log_once(why);
  return made;
}

std::optional<cuda_ipc::SymmetricMemory::SymmetricUsage> TransportSelector::usage() {
  if (!symmetric_memory_) return {};
  free_returned();
  return symmetric_memory_->usage();
}

void TransportSelector::free_returned() {
  std::unique_lock lock(mutex_);
  const auto communicator = communicator_;
  lock.unlock();
  if (communicator) communicator->free_returned();
}

void TransportSelector::leave() {
  devices_->drop_pools(abandoned_);
  if (symmetric_memory_) symmetric_memory_->close();
}

bool TransportSelector::needs_rendezvous() {
  const std::lock_guard lock(mutex_);
  return !rendezvous_done_;
}

std::shared_ptr<TensorStaging> TransportSelector::begin() {
  std::unique_lock lock(mutex_);
  if (!failed_.empty()) throw CollectiveError(failed_);
  const std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator = communicator_;
  const bool log_now = rendezvous_done_ && !std::exchange(logged_, rendezvous_done_);
  lock.unlock();
  if (log_now) log_transport(communicator ? kCudaIpc : kHostStaging);
  return communicator ? stage_through_cuda_ipc(devices_, communicator)
                      : stage_through_host(devices_);
}

void TransportSelector::rendezvous(const std::shared_ptr<ipc::Group>& group, at::Device device,
                                   const ipc::OpContext& context) {
  cuda_ipc::CudaIpcResult found{{}, "this build has no CUDA part"};
  if (const auto gpu = devices_->gpu()) {
    found = cuda_ipc::rendezvous(
        {group, gpu, symmetric_memory_, devices_->stream(device), settings_.buffer_bytes}, context);
    for (const std::string& why : symmetric_memory_->unreachable()) log_once(why);
  }
  std::string failed;
  if (!found.communicator) {
    const std::string summary =
        text("PYCOLLECT_CUDA_TRANSPORT=", kCudaIpc.name, " does not work here: ", found.why);
    log_once(text("collectives of CUDA tensors: ", summary));
    if (settings_.transport == kCudaIpc.name) failed = text(context.operation, ": ", summary);
  }
  const std::lock_guard lock(mutex_);
  failed_ = failed;
  communicator_ = found.communicator;
  rendezvous_done_ = true;
}

std::exception_ptr TransportSelector::close(ipc::Deadline deadline) {
  const std::lock_guard closing(closing_);
  std::shared_ptr<cuda_ipc::CudaIpcCommunicator> communicator;
  {
    const std::lock_guard lock(mutex_);
    communicator.swap(communicator_);
  }
  if (!communicator) return nullptr;
  const std::exception_ptr unreported = communicator->close(deadline);
  abandoned_ = communicator->has_abandoned();
  return unreported;
}

void check_no_capture(const TensorStaging& staging, const char* operation) {
  for (at::Device d : staging.on())
    require(!staging.devices().is_capturing(d), operation,
            ": wait() was called while the current "
            "stream of ",
            d, " is under capture; wait before the capture begins");
}

}  // namespace pycollect::dist
