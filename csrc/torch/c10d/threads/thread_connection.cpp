// See connection.h: ranks that are threads of this process, started by pycollect.threads.
#include <atomic>
#include <map>

#include "../../../plan/error.h"
#include "../connection.h"
#include "../interpreter.h"
#include "../staging.h"
#include "../torch_store.h"
#include "thread_group.h"
#include "thread_messages.h"
#include "thread_store.h"

namespace pycollect::dist {
namespace {

// Queue of one rank that is a thread: its calls go to the group, and waiting for one lets other
// ranks run.
class ThreadQueue final : public ThreadOwner<CallQueue> {
 public:
  using ThreadOwner::ThreadOwner;

  void run(const CollectiveWorkPtr& work) override;
  void push_all(const std::vector<CollectiveWorkPtr>& works) override;

  void wait(GroupWork& work) override;
  bool wait_until(GroupWork& work, ipc::Deadline deadline) override;
  std::vector<Rank> missing() override;
  std::vector<Rank> behind() override;
  void close() { closed_ = true; }

 private:
  void require_open(const char* operation) const;
  void yield_in_order();
  void await(GroupWork& work);
  ThreadGroup::GroupWait until_done(GroupWork& work, ipc::Deadline deadline,
                                    bool is_limited) const override;

  std::atomic<bool> closed_{false};
  std::atomic<bool> has_run_{false};  // calls of all ranks, since this rank has waited
};

void ThreadQueue::require_open(const char* operation) const {
  if (closed_) throw CollectiveError(text(operation, ": the group has been destroyed"));
}

void ThreadQueue::run(const CollectiveWorkPtr& work) {
  const GilRelease gil_release;
  if (!work->call().refusal.empty()) return void(group_->post(rank_, {.refused = work}));
  push_all({work});
  await(*work);
  if (const auto error = work->exception()) std::rethrow_exception(error);
}

void ThreadQueue::push_all(const std::vector<CollectiveWorkPtr>& works) {
  const GilRelease gil_release;
  if (works.empty()) return;
  require_open(works.front()->name());
  group_->require_healthy(rank_, works.front()->name());
  for (const CollectiveWorkPtr& work : works) work->enqueue(shared_from_this());
  if (group_->post(rank_, {.works = works})) has_run_ = true;
}

ThreadGroup::GroupWait ThreadQueue::until_done(GroupWork& of, ipc::Deadline deadline,
                                               bool is_limited) const {
  auto& work = static_cast<CollectiveWork&>(of);
  return {work, [this, &work] { return group_->missing(work); },
          [this, &work] { return group_->describe(work); }, deadline, is_limited};
}

// A rank that has run calls of all ranks continues after those before it.
void ThreadQueue::yield_in_order() {
  const GilRelease gil_release;
  if (has_run_.exchange(false)) group_->yield_in_order(rank_);
}

void ThreadQueue::await(GroupWork& work) {
  yield_in_order();
  ThreadOwner::wait(work);
}

void ThreadQueue::wait(GroupWork& work) {
  if (work.is_done())
    yield_in_order();
  else
    await(work);
}

bool ThreadQueue::wait_until(GroupWork& work, ipc::Deadline deadline) {
  const bool is_done = work.is_done();
  yield_in_order();
  return is_done || ThreadOwner::wait_until(work, deadline);
}

std::vector<Rank> ThreadQueue::missing() {
  const GilRelease gil_release;
  const std::lock_guard lock(mutex());
  return group_->missing();
}

std::vector<Rank> ThreadQueue::behind() {
  const GilRelease gil_release;
  const std::lock_guard lock(mutex());
  return group_->behind(rank_);
}

// The groups that are being created, by a number that rank 0 tells the other ranks.
class NewGroups {
 public:
  std::string add(const std::shared_ptr<ThreadGroup>& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
    groups_[++last_] = group;
    return text(last_);
  }
  std::shared_ptr<ThreadGroup> find(const std::string& number) {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(std::stoull(number));
    return found == groups_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<uint64_t, std::weak_ptr<ThreadGroup>> groups_;
};

NewGroups& new_groups() {
  static NewGroups groups;
  return groups;
}

std::string settings_of(const Options& o) {
  return text(" algorithm=", o.algorithm, " order=", o.order);
}

// All ranks return the same group.
std::shared_ptr<ThreadGroup> find_group(const std::shared_ptr<RankScheduler>& scheduler,
                                        const StorePtr& store, RankAndWorld me,
                                        const Options& options) {
  constexpr char kKey[] = "group of threads";
  const std::string name = options.group_name.empty() ? "default" : options.group_name;
  const ipc::Deadline deadline = ipc::deadline_after(options.timeout);
  const ThreadStore::Purpose purpose(text("the creation of group '", name, "'"), deadline);
  TorchStore bootstrap(store, me.rank, deadline);
  std::shared_ptr<ThreadGroup> group;
  if (me.rank == 0) {
    group = std::make_shared<ThreadGroup>(scheduler, name, me.world);
    scheduler->add_listener(group);
    bootstrap.post(kKey, new_groups().add(group));
  } else {
    group = new_groups().find(bootstrap.read(kKey, deadline));
    if (!group) throw PeerLost("rank 0 gave up creating the group");
  }
  group->join(me.rank, settings_of(options), deadline);
  return group;
}

class ThreadConnection final : public Connection {
 public:
  ThreadConnection(std::shared_ptr<ThreadGroup> group, Rank rank,
                   std::shared_ptr<TorchRuntime> torch)
      : group_(std::move(group)),
        rank_(rank),
        devices_(std::make_shared<DeviceOps>(std::move(torch))),
        queue_(std::make_shared<ThreadQueue>(group_, rank)),
        messages_(std::make_shared<ThreadMessages>(group_, devices_, rank)) {}

  CallQueue& queue() override { return *queue_; }
  std::shared_ptr<PointToPoint> messages() const override { return closed_ ? nullptr : messages_; }
  const std::shared_ptr<DeviceOps>& devices() const override { return devices_; }
  std::shared_ptr<TensorStaging> begin_staging() override {
    return std::make_shared<StreamOrdering>(devices_);
  }

  // All memory of the process is memory that all ranks can access.
  bool has_symmetric_memory(at::Device) const override { return true; }
  at::Tensor new_symmetric(at::Device device, int64_t count, at::ScalarType type) override {
    require_open("allocate_tensor");
    return at::empty({count}, at::TensorOptions(type).device(device));
  }
  std::shared_ptr<SymmetricHeapAllocator> allocator() const override { return nullptr; }

  void require_healthy(const ipc::OpContext& context) const override {
    group_->require_healthy(rank_, context.operation);
  }
  void abort(const std::string& why) override { group_->abort(rank_, why); }
  std::exception_ptr close(ipc::Deadline) override {
    if (closed_.exchange(true)) return nullptr;
    queue_->close();
    group_->leave(rank_);
    return nullptr;
  }

 private:
  void require_open(const char* operation) const {
    if (closed_) throw CollectiveError(text(operation, ": the group has been destroyed"));
  }

  const std::shared_ptr<ThreadGroup> group_;
  const Rank rank_;
  const std::shared_ptr<DeviceOps> devices_;
  const std::shared_ptr<ThreadQueue> queue_;
  const std::shared_ptr<ThreadMessages> messages_;
  std::atomic<bool> closed_{false};
};

}  // namespace

std::shared_ptr<Connection> connect_threads(const std::shared_ptr<RankScheduler>& scheduler,
                                            const StorePtr& store, RankAndWorld me,
                                            const Options& options) {
  return std::make_shared<ThreadConnection>(find_group(scheduler, store, me, options), me.rank,
                                            options.torch ? options.torch : torch_runtime());
}

}  // namespace pycollect::dist
