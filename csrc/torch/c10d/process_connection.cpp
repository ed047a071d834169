// See connection.h: ranks that are processes of one host.
#include <mutex>

#include "../../plan/error.h"
#include "binder.h"
#include "connection.h"
#include "messages.h"
#include "process_queue.h"
#include "symmetric_heap_allocator.h"
#include "torch_store.h"

namespace pycollect::dist {
namespace {

constexpr std::chrono::seconds kPollInterval{1};  // arbitrary: the call has a timeout of its own
// The bytes of a staging buffer are a multiple of this, so that any kernel access is aligned.
constexpr std::size_t kAlign = 128;

ipc::GroupSettings settings_of(const Options& o, int world) {
  return {.name = o.group_name.empty() ? "default" : o.group_name,
          .timeout = o.timeout,
          .buffer_bytes = o.buffer_bytes,
          .mailbox_bytes = ipc::Mailbox::bytes(world),
          .symmetric_heap_bytes =
              o.symmetric_heap_bytes.value_or(ipc::SymmetricHeap::default_bytes(world)),
          .signal_pad_bytes = cuda_ipc::SignalPad::bytes(world),
          .common_settings = text(" cuda_buffer_bytes=", o.cuda_buffer_bytes,
                                  " cuda_transport=", o.cuda_transport)};
}

std::shared_ptr<ipc::Group> make_group(const StorePtr& store, RankAndWorld me,
                                       const Options& options) {
  TorchStore bootstrap(store, me.rank, ipc::deadline_after(options.timeout));
  return std::make_shared<ipc::Group>(bootstrap, me.rank, me.world, settings_of(options, me.world));
}

class ProcessConnection final : public Connection {
 public:
  ProcessConnection(const StorePtr& store, RankAndWorld me, const Options& options)
      : selector_(std::make_shared<TransportSelector>(
            std::make_shared<DeviceOps>(options.torch ? options.torch : torch_runtime()),
            TransportSelector::TransportSettings{options.cuda_transport,
                                                 options.cuda_buffer_bytes / kAlign * kAlign})),
        group_(make_group(store, me, options)),
        messages_(std::make_shared<Messages>(group_, selector_)),
        allocator_(std::make_shared<SymmetricHeapAllocator>(*group_)),
        queue_(std::make_shared<ProcessQueue>(std::make_shared<CallRunner>(group_))) {
    selector_->attach(*group_);
  }

  CallQueue& queue() override { return *queue_; }
  std::shared_ptr<PointToPoint> messages() const override {
    const std::lock_guard lock(mutex_);
    return messages_;
  }
  const std::shared_ptr<DeviceOps>& devices() const override { return selector_->devices(); }
  void connect(const Call& before, at::Device device) override;
  std::shared_ptr<TensorStaging> begin_staging() override { return selector_->begin(); }

  bool has_symmetric_memory(at::Device device) const override;
  at::Tensor new_symmetric(at::Device device, int64_t count, at::ScalarType type) override;
  std::shared_ptr<SymmetricHeapAllocator> allocator() const override {
    const std::lock_guard lock(mutex_);
    return allocator_;
  }
  TransportSelector* selector() const override { return selector_.get(); }

  void require_healthy(const ipc::OpContext& context) const override {
    if (const auto group = this->group()) group->require_healthy(context);
  }
  void abort(const std::string& why) override {
    if (const auto group = this->group()) group->abort(why);
  }
  std::exception_ptr close(ipc::Deadline deadline) override;

 private:
  std::shared_ptr<ipc::Group> group() const {
    const std::lock_guard lock(mutex_);
    return group_;
  }

  const std::shared_ptr<TransportSelector> selector_;
  mutable std::mutex mutex_;  // guards group_, messages_ and allocator_, which close() resets
  std::shared_ptr<ipc::Group> group_;
  std::shared_ptr<Messages> messages_;
  std::shared_ptr<SymmetricHeapAllocator> allocator_;
  const std::shared_ptr<ProcessQueue> queue_;
  std::mutex rendezvous_mutex_;  // held by the thread that runs the GPU rendezvous
};

bool ProcessConnection::has_symmetric_memory(at::Device device) const {
  const auto group = this->group();
  if (!group) return false;
  if (device.is_cuda() || selector_->serves_symmetric(device))
    return selector_->benefits_from_symmetric_memory(device);
  return group->layout().sizes.symmetric_heap_bytes > 0;
}

at::Tensor ProcessConnection::new_symmetric(at::Device device, int64_t count, at::ScalarType type) {
  const auto heap = allocator();
  if (!heap) throw CollectiveError("allocate_tensor: the group has been destroyed");
  if (device.is_cuda() || selector_->serves_symmetric(device))
    return selector_->empty(device, count, type);
  return heap->empty({count}, type);
}

// Runs the GPU rendezvous as a call of its own, before the call that needs it. If a rank makes
// another call, the fingerprints differ and all ranks throw.
void ProcessConnection::connect(const Call& before, at::Device device) {
  const std::lock_guard lock(rendezvous_mutex_);
  if (!selector_->needs_rendezvous()) return;
  Call call{.collective = before.collective,
            .name = before.name,
            .timeout = before.timeout,
            .requests = {{.collective = before.collective, .tensors = 0, .on_gpus = true}},
            .then = [selector = selector_, group = group(), device](const ipc::OpContext& context) {
              selector->rendezvous(group, device, context);
            }};
  // wait() would run queued calls on this thread, whose callbacks may call connect(), too.
  const auto work = queue_->push(std::move(call));
  while (!queue_->wait_until(*work, ipc::Clock::now() + kPollInterval)) {
  }
  if (const auto error = work->exception()) std::rethrow_exception(error);
}

std::exception_ptr ProcessConnection::close(ipc::Deadline deadline) {
  queue_->close(deadline);
  const std::exception_ptr unreported = selector_->close(device_deadline(deadline));
  devices()->await_held(device_deadline(deadline));
  std::shared_ptr<Messages> messages;
  std::shared_ptr<ipc::Group> group;
  std::shared_ptr<SymmetricHeapAllocator> allocator;
  {
    const std::lock_guard lock(mutex_);
    messages.swap(messages_);
    group.swap(group_);
    allocator.swap(allocator_);
  }
  if (messages) messages->close(deadline);
  if (group) {
    selector_->leave();
    group->leave();  // a work held by the caller may keep the group alive
  }
  return queue_->has_failed() ? nullptr : unreported;
}

}  // namespace

std::shared_ptr<Connection> connect_processes(const StorePtr& store, RankAndWorld me,
                                              const Options& options) {
  return std::make_shared<ProcessConnection>(store, me, options);
}

}  // namespace pycollect::dist
