// See rank_communicator.h: ranks that are processes, of one host or of several.
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "../../group/placement.h"
#include "../../group/rendezvous.h"
#include "../../hosts/hosts_executor.h"
#include "../../plan/error.h"
#include "../../plan/select.h"
#include "../log.h"
#include "binder.h"
#include "hosts/gloo_channel.h"
#include "hosts/hosts_monitor.h"
#include "hosts/mirrored_rings.h"
#include "interpreter.h"
#include "messages.h"
#include "process_queue.h"
#include "rank_communicator.h"
#include "torch_store.h"

namespace pycollect::dist {
namespace {

// How long a rank that destroys the default group stays for rank 0 to do so, too; how long for
// torch to drop the store after that, which takes a millisecond unless the user refers to a group;
// and how long if rank 0 is on another host.
constexpr std::chrono::milliseconds kRankZeroTime{2000}, kStoreTime{200}, kRemoteStoreTime{500};

// A rank that waits for another host leaves its core to the threads that send and receive.
constexpr std::chrono::microseconds kHostsYieldTime{50};

ipc::GroupSettings settings_of(const Options& o, int world) {
  return {.name = o.group_name.empty() ? "default" : o.group_name,
          .timeout = o.timeout,
          .buffer_bytes = o.buffer_bytes.value_or(ipc::GroupSettings{}.buffer_bytes),
          .mailbox_bytes = ipc::MailArea::bytes(world),
          .mailbox_header_bytes = ipc::MailArea::header_bytes(world),
          .symmetric_heap_bytes =
              o.symmetric_heap_bytes.value_or(ipc::SymmetricHeap::default_bytes(world)),
          .common_settings = text(" hosts=", o.hosts, " order=", o.order, " pycollect=", o.version),
          .one_host = o.hosts == kOneHost,
          .check_signals = &check_signals};
}

std::shared_ptr<ipc::Group> make_group(const StorePtr& store, RankAndWorld me,
                                       ipc::GroupSettings settings) {
  TorchStore bootstrap(store, me.rank, ipc::deadline_after(settings.timeout));
  return std::make_shared<ipc::Group>(bootstrap, me.rank, me.world, std::move(settings));
}

// The ranks of this host, and the channel to the others.
struct JoinedGroup {
  std::shared_ptr<ipc::Group> group;
  std::shared_ptr<GlooChannel> channel = {};  // null: one host

  std::unique_ptr<ipc::CollectiveExecutor> executor() const {
    const cpu::ParallelFor threads = threads_of_rank(group->fold_threads());
    if (channel) return std::make_unique<ipc::HostsExecutor>(*group, threads, channel);
    return std::make_unique<ipc::RankExecutor>(*group, threads);
  }
};

// Logs on which hosts the ranks are. Warns of ranks of one machine that cannot share memory and so
// count as several hosts, because that is slower and may be a mistake in the set-up of containers.
void log_hosts(const Hosts& hosts, const std::vector<std::string>& names,
               const std::vector<ipc::PeerInfo>& ranks) {
  std::string places;
  bool one_machine = false;
  for (int h = 0; h < hosts.count(); ++h) {
    const ipc::PeerInfo& first = ranks[hosts.ranks(h)[0]];
    places += text(h == 0 ? "" : ", ", ipc::name(hosts.ranks(h)), " on ", names[h]);
    for (int other = 0; other < h; ++other) {
      const ipc::PeerInfo& earlier = ranks[hosts.ranks(other)[0]];
      one_machine |= earlier.boot == first.boot && earlier.network_space != first.network_space;
    }
  }
  log_once(text("the ranks are on ", hosts.count(), " hosts: ", places));
  const char* const given = std::getenv("PYCOLLECT_HOST");
  if (one_machine && (given == nullptr || *given == '\0'))
    warn(
        text("ranks of one machine are in different network namespaces, so they do not share "
             "memory and exchange data through Gloo, which is slower: ",
             places, "; set PYCOLLECT_HOST if that is intended"));
}

// Makes a group of the ranks of each host, and connects the hosts.
JoinedGroup make_hosts(const StorePtr& store, RankAndWorld me, const Options& options,
                       const std::vector<ipc::PeerInfo>& ranks) {
  const Hosts hosts = ipc::hosts_of(ranks);
  const int host = hosts.of(me.rank);
  const auto keys = [&](const std::string& of) {  // no other group's
    return c10::make_intrusive<c10d::PrefixStore>(text("pycollect/", ranks[0].nonce, "/", of),
                                                  store);
  };
  const RankAndWorld here{hosts.index(me.rank), static_cast<int>(hosts.ranks(host).size())};
  ipc::GroupSettings settings = settings_of(options, here.world);
  settings.world_ranks = hosts.ranks(host);
  for (Rank r = 0; r < me.world; ++r)
    if (hosts.of(r) != host) settings.world_ranks.push_back(r);
  settings.yield_time = kHostsYieldTime;
  settings.one_host = true;
  settings.exposed_bytes = ipc::HostsExecutor::kExposedBytes;
  Meeting meeting(keys("hosts"), me.rank);
  JoinedGroup made;
  try {
    made.group = make_group(keys(text("host ", host)), here, std::move(settings));
    require(options.gloo != nullptr, "this group cannot span hosts: it was made without ",
            "pycollect.distributed");
    const std::vector<std::string> names = ipc::names_of(hosts, ranks);
    if (me.rank == 0) log_hosts(hosts, names, ranks);
    made.channel = std::make_shared<GlooChannel>(
        hosts, names, me.rank, options.gloo(keys("gloo"), me.rank, me.world, options.timeout));
    const ipc::OpContext context{options.is_default ? "init_process_group" : "new_group", 0,
                                 ipc::deadline_after(options.timeout), ipc::Clock::now()};
    made.channel->connect(*made.group, meeting, context);
  } catch (const std::exception& error) {
    meeting.give_up(made.group.get(), error);
    throw;
  }
  return made;
}

JoinedGroup join(const StorePtr& store, RankAndWorld me, const Options& options) {
  try {
    return {make_group(store, me, settings_of(options, me.world))};
  } catch (const ipc::SeveralHosts& found) {
    return make_hosts(store, me, options, found.ranks);
  }
}

class ProcessCommunicator final : public RankCommunicator {
 public:
  ProcessCommunicator(const StorePtr& store, RankAndWorld me, const Options& options)
      : devices_(std::make_shared<DeviceOps>(options.torch ? options.torch : torch_runtime())),
        joined_(join(store, me, options)),
        group_(joined_.group),
        remote_(joined_.channel ? std::make_shared<MirroredRings>(group_, joined_.channel)
                                : nullptr),
        messages_(std::make_shared<Messages>(group_, *devices_, remote_)),
        allocator_(std::make_shared<SymmetricHeapAllocator>(*group_)),
        queue_(std::make_shared<ProcessQueue>(
            std::make_shared<CallRunner>(group_, joined_.executor()))) {
    if (options.is_default) server_.emplace(store);
    if (joined_.channel)
      monitor_ = std::make_unique<HostsMonitor>(group_, joined_.channel,
                                                [remote = remote_] { remote->answer_hellos(); });
  }

  void run(const CollectiveWorkPtr& work) override { queue_->run(work); }
  void push_all(const std::vector<CollectiveWorkPtr>& works) override { queue_->push_all(works); }
  std::vector<Rank> behind() override { return queue_->behind(); }
  WorkPtr post(const P2POp& op) override {
    if (const auto messages = locked(messages_)) return messages->post(op);
    throw group_destroyed(op.name());
  }
  const std::shared_ptr<DeviceOps>& devices() const override { return devices_; }
  std::shared_ptr<TensorStaging> begin_staging() override { return stage_through_host(devices_); }

  bool has_symmetric_memory(at::Device device) const override;
  at::Tensor new_symmetric(at::Device device, int64_t count, at::ScalarType type) override;
  std::shared_ptr<SymmetricHeapAllocator> allocator() const override { return locked(allocator_); }

  void require_open(const char* operation) const override {
    if (!locked(group_)) throw group_destroyed(operation);
  }
  void require_healthy(const ipc::OpContext& context) const override {
    if (const auto group = locked(group_)) group->require_healthy(context);
  }
  void abort(const std::string& why) override {
    if (const auto group = locked(group_)) group->abort(why);
  }
  std::exception_ptr close(ipc::Deadline deadline) override;
  void await_end_of_store() override;

 private:
  template <class T>
  T locked(const T& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }

  const std::shared_ptr<DeviceOps> devices_;
  JoinedGroup joined_;
  mutable std::mutex mutex_;  // guards the members down to allocator_, which close() resets
  std::shared_ptr<ipc::Group> group_;
  std::shared_ptr<MirroredRings> remote_;  // null: one host
  std::shared_ptr<Messages> messages_;
  std::unique_ptr<HostsMonitor> monitor_;  // null: one host
  std::shared_ptr<SymmetricHeapAllocator> allocator_;
  const std::shared_ptr<ProcessQueue> queue_;
  std::optional<StoreServer> server_;             // of the default group's store
  std::shared_ptr<const ipc::Group> left_group_;  // after close()
};

bool ProcessCommunicator::has_symmetric_memory(at::Device device) const {
  const auto group = locked(group_);
  return group && device.is_cpu() && group->layout().sizes.symmetric_heap_bytes > 0;
}

at::Tensor ProcessCommunicator::new_symmetric(at::Device device, int64_t count,
                                              at::ScalarType type) {
  const auto heap = allocator();
  if (!heap) throw group_destroyed("allocate_tensor");
  require(device.is_cpu(),
          "allocate_tensor: processes share host memory only; allocate a tensor on ", device,
          " with torch.empty(), which collectives take as it is, or pass device='cpu'");
  return heap->empty({count}, type);
}

std::exception_ptr ProcessCommunicator::close(ipc::Deadline deadline) {
  std::exception_ptr raised = queue_->close(deadline);
  if (raised) deadline = ipc::Clock::now();
  {
    const SignalsDeferred deferred;
    devices_->await_held(device_deadline(deadline));
  }
  std::shared_ptr<Messages> messages;
  std::shared_ptr<MirroredRings> remote;
  std::shared_ptr<ipc::Group> group;
  std::shared_ptr<SymmetricHeapAllocator> allocator;
  std::unique_ptr<HostsMonitor> monitor;
  JoinedGroup joined;
  {
    const std::lock_guard lock(mutex_);
    messages.swap(messages_);
    remote.swap(remote_);
    monitor.swap(monitor_);
    std::swap(joined, joined_);
    group.swap(group_);
    allocator.swap(allocator_);
  }
  if (messages)
    if (auto in_messages = messages->close(deadline)) raised = in_messages;
  const SignalsDeferred deferred;
  monitor.reset();
  if (remote) remote->join();
  if (group) {
    const bool ends_store = server_ && server_->ends_with_group();
    // A thread inside a call may keep the group alive.
    group->leave(ends_store ? ipc::RankState::left_with_store : ipc::RankState::has_left);
    if (server_ && server_->exists()) left_group_ = std::move(group);
  }
  return raised;
}

// Returns when the store of rank 0's process has ended, if it does: a rank that connects to it for
// its next group would lose it. Waits neither long for rank 0 nor for a store that a launcher or
// the user keeps.
void ProcessCommunicator::await_end_of_store() {
  std::shared_ptr<const ipc::Group> group;
  {
    const std::lock_guard lock(mutex_);
    group.swap(left_group_);
  }
  const char* const launcher = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  if (!group || (launcher != nullptr && std::string_view(launcher) == "True")) return;
  if (group->world_rank(0) != 0) return server_->await_end(kRemoteStoreTime);
  if (group->rank() == 0) return;
  const auto end = ipc::Clock::now() + kRankZeroTime;
  const auto& left = group->rank_state(0).left;
  for (; left == 0 && (group->dead() & 1) == 0 && ipc::Clock::now() < end; check_signals())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (left == ipc::RankState::left_with_store) server_->await_end(kStoreTime);
}

}  // namespace

std::shared_ptr<RankCommunicator> connect_processes(const StorePtr& store, RankAndWorld me,
                                                    const Options& options) {
  return std::make_shared<ProcessCommunicator>(store, me, options);
}

}  // namespace pycollect::dist
