// See rank_communicator.h: ranks that are threads of this process, started by pycollect.threads.
#include <atomic>
#include <map>

#include "../../../plan/error.h"
#include "../interpreter.h"
#include "../rank_communicator.h"
#include "../staging.h"
#include "../torch_store.h"
#include "thread_group.h"
#include "thread_mailbox.h"
#include "thread_store.h"

namespace pycollect::dist {
namespace {

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

// Owns all works of the rank: waiting for one lets other ranks run.
class ThreadCommunicator final : public RankCommunicator,
                                 public WorkOwner,
                                 public std::enable_shared_from_this<ThreadCommunicator> {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, Rank rank,
                     std::shared_ptr<TorchRuntime> torch)
      : group_(std::move(group)),
        rank_(rank),
        devices_(std::make_shared<DeviceOps>(std::move(torch))) {}

  void run(const CollectiveWorkPtr& work) override;
  void push_all(const std::vector<CollectiveWorkPtr>& works) override;
  std::vector<Rank> behind() override {
    const GilRelease gil_release;
    const std::lock_guard lock(mutex());
    return group_->behind(rank_);
  }
  WorkPtr post(const P2POp& op) override;
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

  void require_open(const char* operation) const override {
    if (closed_) throw group_destroyed(operation);
  }
  void require_healthy(const ipc::OpContext& context) const override {
    group_->require_healthy(rank_, context.operation);
  }
  void abort(const std::string& why) override { group_->abort(rank_, why); }
  std::exception_ptr close(ipc::Deadline) override {
    if (!closed_.exchange(true)) group_->leave(rank_);
    return nullptr;
  }

  // As the owner of the rank's works.
  void wait(GroupWork& work) override;
  bool wait_until(GroupWork& work, ipc::Deadline deadline) override;
  void progress(GroupWork& work) override {
    group_->yield_until(rank_, until_done(work, ipc::Deadline::max()));
  }
  void on_future_taken() override { group_->count_open_futures(1); }
  std::string describe(GroupWork& work) override;
  std::mutex& mutex() override { return group_->mutex(); }

 private:
  void yield_in_order();
  void await(GroupWork& work);
  ThreadGroup::GroupWait until_done(GroupWork& work, ipc::Deadline deadline,
                                    bool is_limited = false) const;

  const std::shared_ptr<ThreadGroup> group_;
  const Rank rank_;
  const std::shared_ptr<DeviceOps> devices_;
  std::atomic<uint64_t> next_message_{0};
  std::atomic<bool> closed_{false};
  std::atomic<bool> has_run_{false};  // calls of all ranks, since this rank has waited
};

// Returns null for a collective.
MessageWork* as_message(GroupWork& work) { return dynamic_cast<MessageWork*>(&work); }

void ThreadCommunicator::run(const CollectiveWorkPtr& work) {
  const GilRelease gil_release;
  if (!work->call().refusal.empty()) return void(group_->post(rank_, {.refused = work}));
  push_all({work});
  yield_in_order();
  await(*work);
  if (const auto error = work->exception()) std::rethrow_exception(error);
}

void ThreadCommunicator::push_all(const std::vector<CollectiveWorkPtr>& works) {
  const GilRelease gil_release;
  if (works.empty()) return;
  require_open(works.front()->name());
  group_->require_healthy(rank_, works.front()->name());
  for (const CollectiveWorkPtr& work : works) work->enqueue(shared_from_this());
  if (group_->post(rank_, {.works = works})) has_run_ = true;
}

WorkPtr ThreadCommunicator::post(const P2POp& op) {
  const GilRelease gil_release;
  require_open(op.name());
  const bool on_device = check_message(op, group_->world(), *devices_);
  group_->require_healthy(rank_, op.name());
  std::shared_ptr<StreamOrdering> staging;
  if (on_device) {
    staging = std::make_shared<StreamOrdering>(devices_);
    staging->add_whole(op.tensor);
    staging->begin_copy_in();
  }
  // A rank may leave the group, and wait for its messages then.
  auto work = c10::make_intrusive<MessageWork>(op, next_message_++, rank_, std::move(staging),
                                               weak_from_this(), shared_from_this());
  group_->mailbox().post(work);
  return work;
}

// A rank that has run calls of all ranks continues after those before it.
void ThreadCommunicator::yield_in_order() {
  const GilRelease gil_release;
  if (has_run_.exchange(false)) group_->yield_in_order(rank_);
}

void ThreadCommunicator::await(GroupWork& work) {
  group_->wait(rank_, until_done(work, ipc::deadline_after(work.limit())));
}

void ThreadCommunicator::wait(GroupWork& work) {
  if (as_message(work) != nullptr) return await(work);
  const bool is_done = work.is_done();
  yield_in_order();
  if (!is_done) await(work);
}

bool ThreadCommunicator::wait_until(GroupWork& work, ipc::Deadline deadline) {
  if (as_message(work) == nullptr) {
    const bool is_done = work.is_done();
    yield_in_order();
    if (is_done) return true;
  }
  return group_->wait_until(rank_, until_done(work, deadline, true));
}

std::string ThreadCommunicator::describe(GroupWork& work) {
  if (const auto* const message = as_message(work)) return group_->mailbox().describe(*message);
  const GilRelease gil_release;
  const std::lock_guard lock(mutex());
  return dist::describe(work, group_->missing());
}

// See ThreadGroup::GroupWait.
ThreadGroup::GroupWait ThreadCommunicator::until_done(GroupWork& work, ipc::Deadline deadline,
                                                      bool is_limited) const {
  if (const auto* const message = as_message(work))
    return {work, [message] { return ThreadMailbox::needed(*message); },
            [this, message] { return group_->mailbox().describe(*message); }, deadline, is_limited};
  auto& call = static_cast<CollectiveWork&>(work);
  return {work, [this, &call] { return group_->missing(call); },
          [this, &call] { return group_->describe(call); }, deadline, is_limited};
}

}  // namespace

std::shared_ptr<RankCommunicator> connect_threads(const std::shared_ptr<RankScheduler>& scheduler,
                                                  const StorePtr& store, RankAndWorld me,
                                                  const Options& options) {
  return std::make_shared<ThreadCommunicator>(find_group(scheduler, store, me, options), me.rank,
                                              options.torch ? options.torch : torch_runtime());
}

}  // namespace pycollect::dist
