// See thread_group.h.
#include "thread_group.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "../../../group/placement.h"
#include "../../../plan/error.h"
#include "../interpreter.h"
#include "joint_call.h"
#include "thread_mailbox.h"

namespace pycollect::dist {

ThreadGroup::ThreadGroup(std::shared_ptr<RankScheduler> scheduler, std::string name, int world)
    : scheduler_(std::move(scheduler)),
      name_(std::move(name)),
      world_(world),
      mailbox_(std::make_shared<ThreadMailbox>(*this)),
      launch_ranks_(world, -1),
      settings_(world),
      left_(world),
      next_(world) {}

void ThreadGroup::join(Rank rank, const std::string& settings, ipc::Deadline deadline) {
  const Rank launch_rank = scheduler_->rank_of_thread();
  {
    const Lock lock(mutex());
    launch_ranks_[rank] = launch_rank;
    settings_[rank] = settings;
    ++joined_;
    scheduler_->notify();
  }
  const auto describe = [&] { return text("the creation of group '", name_, "'"); };
  if (!scheduler_->wait(launch_rank, {[&] { return joined_ == world_; }, describe, deadline}))
    throw Timeout(
        text("group '", name_, "': not all ranks have joined before the timeout was over"));
  for (Rank r = 1; r < world_; ++r)
    require(settings_[r] == settings_[0], "all ranks of group '", name_,
            "' must have the same options: rank ", r, " has", settings_[r], ", rank 0 has",
            settings_[0]);
}

void ThreadGroup::leave(Rank rank) {
  Lock lock(mutex());
  left_[rank] = any_left_ = true;
  // A wait for a future does not see that a rank has left.
  for (const JointCall& joint : joint_calls_)
    for (const auto& calls : joint.by_rank)
      if (calls && !joint.by_rank[rank] && !aborted_ &&
          std::any_of(calls->works.begin(), calls->works.end(),
                      [](const auto& w) { return w->has_future(); }))
        return abort(lock, AbortKind::peer_lost,
                     text(describe(*calls->works[0]), ": rank ", rank, " has left the group"));
  scheduler_->notify();
}

bool ThreadGroup::post(Rank rank, PostedCalls calls) {
  Lock lock(mutex());
  if (aborted_) {  // since the caller has asked
    lock.unlock();
    JointCall refused{std::vector<std::optional<PostedCalls>>(world_)};
    refused.by_rank[rank] = std::move(calls);
    complete_all(finish(refused, error_of_abort()));
    return false;
  }
  const uint64_t place = next_[rank]++ - first_;
  while (joint_calls_.size() <= place)
    joint_calls_.push_back({std::vector<std::optional<PostedCalls>>(world_)});
  joint_calls_[place].by_rank[rank] = std::move(calls);
  ++joint_calls_[place].arrived;
  return !running_ && run_joint_calls(lock);
}

// Runs the joint calls for which all ranks have arrived. Then runs the callbacks of their futures,
// which may post the next ones.
bool ThreadGroup::run_joint_calls(Lock& lock) {
  running_ = true;
  const uint64_t first = first_;
  Completions completions;
  while (!joint_calls_.empty() && joint_calls_.front().arrived == world_ && !aborted_) {
    {
      const JointCall joint = std::move(joint_calls_.front());
      joint_calls_.pop_front();
      for (const auto& calls : joint.by_rank)
        for (const CollectiveWorkPtr& work : calls->works) work->start();
      const uint64_t number = first_++;
      lock.unlock();
      const std::exception_ptr error = run(joint, number);
      std::ranges::move(finish(joint, [&](CollectiveWork&) { return error; }),
                        std::back_inserter(completions));
    }
    lock.lock();
  }
  running_ = false;
  const bool has_run = first_ != first;
  lock.unlock();
  complete_all(completions);
  return has_run;
}

// Returns the error of all ranks' calls, or null.
std::exception_ptr ThreadGroup::run(const JointCall& joint, uint64_t number) {
  try {
    const RankScheduler::AtWork at_work(*scheduler_);
    std::vector<const PostedCalls*> calls;
    for (const auto& c : joint.by_rank) calls.push_back(&*c);
    check_joint_call(calls, number);
    std::vector<std::vector<GroupCall*>> of_ranks(world_);
    for (Rank r = 0; r < world_; ++r)
      for (const CollectiveWorkPtr& work : calls[r]->works) of_ranks[r].push_back(&work->call());
    run_jointly(of_ranks, scheduler_->loop_share());
    return nullptr;
  } catch (const TypeError&) {
    return std::current_exception();
  } catch (const std::invalid_argument& e) {  // the calls differ
    return std::make_exception_ptr(
        std::invalid_argument(text(e.what(), scheduler_->describe_ranks())));
  } catch (...) {
    return std::current_exception();
  }
}

// Returns what completes the futures. Tensors are released without the mutex, because that may take
// the GIL.
ThreadGroup::Completions ThreadGroup::finish(const JointCall& joint, const ErrorOfWork& error_of) {
  Completions completions;
  std::vector<GroupCall> used;
  for (const auto& calls : joint.by_rank)
    if (calls)
      for (const CollectiveWorkPtr& work : calls->works) work->call().event.reset();
  {
    const Lock lock(mutex());
    for (Rank r = 0; r < world_; ++r) {
      if (!joint.by_rank[r]) continue;
      for (const CollectiveWorkPtr& work : joint.by_rank[r]->works) {
        const std::exception_ptr error = error_of(*work);
        used.push_back(work->detach());
        auto future = work->finish(error);
        if (!future) continue;
        count_open_futures(-1);
        completions.push_back([this, r, future, work] { complete_later(r, future, work); });
      }
    }
    notify();
  }
  return completions;
}

ThreadGroup::ErrorOfWork ThreadGroup::error_of_abort() const {
  return [this](CollectiveWork& work) { return cause(describe(work)); };
}

void ThreadGroup::complete_all(const Completions& completions) {
  for (const auto& complete : completions) complete();
}

void ThreadGroup::complete_later(Rank rank, c10::intrusive_ptr<Future> future,
                                 const c10::intrusive_ptr<GroupWork>& work) {
  // The callback may run Python code on a thread of its own.
  const auto in_flight = std::make_shared<InFlightGuard>();
  scheduler_->run_as(launch_ranks_[rank], [in_flight, future, work] {
    complete(*future, work->result(), work->exception(), work->staging());
  });
}

void ThreadGroup::run_on_thread(Rank rank, std::function<void()> callback) {
  const auto in_flight = std::make_shared<InFlightGuard>();
  scheduler_->run_on_thread(launch_ranks_[rank],
                            [in_flight, callback = std::move(callback)] { callback(); });
}

std::vector<Rank> ThreadGroup::missing() const {
  return joint_calls_.empty() ? std::vector<Rank>() : missing(joint_calls_.front());
}

std::vector<Rank> ThreadGroup::behind(Rank rank) const {
  std::vector<Rank> ranks;
  for (Rank r = 0; r < world_; ++r)
    if (next_[r] < next_[rank]) ranks.push_back(r);
  return ranks;
}

std::vector<Rank> ThreadGroup::missing(const CollectiveWork& work) const {
  const auto contains = [&](const std::optional<PostedCalls>& calls) {
    return calls && std::any_of(calls->works.begin(), calls->works.end(),
                                [&](const auto& w) { return w.get() == &work; });
  };
  for (const JointCall& joint : joint_calls_)
    if (std::any_of(joint.by_rank.begin(), joint.by_rank.end(), contains)) return missing(joint);
  return {};
}

std::vector<Rank> ThreadGroup::missing(const JointCall& joint) const {
  std::vector<Rank> ranks;
  for (Rank r = 0; r < world_; ++r)
    if (!joint.by_rank[r]) ranks.push_back(r);
  return ranks;
}

void ThreadGroup::notify() {
  ended_.notify_all();
  scheduler_->notify();
}

// A work that runs ends soon, whatever happens to its group. After an abort of the group no work
// begins to run, so that a wait may throw.
void ThreadGroup::await_end(Lock& lock, const GroupWork& work) {
  const RankScheduler::AtWork at_work(*scheduler_);  // so that the rank keeps its turn
  ended_.wait(lock, [&] { return !work.runs(); });
}

bool ThreadGroup::wait_until(Rank rank, const GroupWait& wait) {
  const GilRelease gil_release;
  require_own(rank, wait);
  const GroupWork& work = wait.work;
  const auto over = [&] {
    return work.is_done() || (!work.runs() && (aborted_ || !lost(wait).empty()));
  };
  std::exception_ptr end;  // of the launch
  try {
    scheduler_->wait(launch_ranks_[rank], {over, wait.describe, wait.deadline, wait.is_limited});
  } catch (const CollectiveError&) {
    end = std::current_exception();
    scheduler_->pass_on_abort(*this);
  }
  Lock lock(mutex());
  if (!end) abort_if_lost(lock, wait);
  await_end(lock, work);
  if (work.is_done()) return true;
  if (end) std::rethrow_exception(end);
  if (aborted_) std::rethrow_exception(cause(wait.describe()));
  return false;
}

void ThreadGroup::wait(Rank rank, const GroupWait& wait) {
  const GilRelease gil_release;
  const auto begin = ipc::Clock::now();
  if (wait_until(rank, wait)) return;
  const std::chrono::duration<double> waited = ipc::Clock::now() - begin;
  const std::string report = scheduler_->describe_ranks();
  Lock lock(mutex());
  await_end(lock, wait.work);  // it may have begun since
  if (wait.work.is_done()) return;
  time_out(lock, {wait.describe(), wait.needed(), waited}, report);
  await_end(lock, wait.work);
  if (!wait.work.is_done()) std::rethrow_exception(cause(wait.describe()));
}

void ThreadGroup::time_out(Lock& lock, const OverdueWork& work, const std::string& report) {
  const std::string late = work.late.empty() ? "" : ipc::name(work.late) + " did not arrive";
  abort(lock, AbortKind::timed_out,
        text(work.operation, ": Timed out after ", std::round(work.waited.count() * 10) / 10, " s",
             late.empty() ? "" : "; ", late, report));
}

void ThreadGroup::poll() {
  const auto now = ipc::Clock::now();
  Lock lock(mutex());
  if (aborted_) return;
  auto due = find_due(now);
  if (!due) due = mailbox_->find_due(now);
  if (due) time_out(lock, *due, "");
}

std::optional<OverdueWork> ThreadGroup::find_due(ipc::Deadline now) const {
  for (const JointCall& joint : joint_calls_)
    for (const auto& calls : joint.by_rank)
      if (calls)
        for (const CollectiveWorkPtr& work : calls->works)
          if (work->due() <= now)
            return OverdueWork{describe(*work), missing(joint), work->limit()};
  return {};
}

std::string ThreadGroup::describe(CollectiveWork& work) const {
  const GroupCall& call = work.call();
  std::string description = text(call.name, " #", call.number, " of group '", name_, "'");
  const at::TensorList tensors =
      call.results.empty() ? at::TensorList(call.held) : at::TensorList(call.results);
  if (tensors.empty()) return description;
  description += text(" on ", tensors[0].sizes(), " ", dtype_name(tensors[0]));
  if (tensors.size() > 1) description += text(" and ", tensors.size() - 1, " more");
  return description;
}

void ThreadGroup::yield_until(Rank rank, const GroupWait& wait) {
  const GilRelease gil_release;
  require_own(rank, wait);
  const auto done = [&] { return wait.work.is_done(); };
  try {
    if (scheduler_->yield_until(launch_ranks_[rank], {done, wait.describe})) return;
  } catch (const CollectiveError&) {  // the launch has been aborted
    scheduler_->pass_on_abort(*this);
    Lock lock(mutex());
    await_end(lock, wait.work);
    if (!wait.work.is_done()) throw;
  }
  Lock lock(mutex());
  if (any_left_) abort_if_lost(lock, wait);
}

std::vector<Rank> ThreadGroup::lost(const GroupWait& wait) const {
  std::vector<Rank> ranks;
  if (any_left_) ranks = wait.needed();
  std::erase_if(ranks, [&](Rank r) { return !left_[r]; });
  return ranks;
}

void ThreadGroup::abort_if_lost(Lock& lock, const GroupWait& wait) {
  if (aborted_ || wait.work.is_done() || wait.work.runs()) return;
  const std::vector<Rank> ranks = lost(wait);
  if (ranks.empty()) return;
  lock.unlock();
  const std::string report = scheduler_->describe_ranks();
  lock.lock();
  abort(lock, AbortKind::peer_lost,
        text(wait.describe(), ": ", ipc::name(ranks), ranks.size() == 1 ? " has" : " have",
             " left the group", report));
}

void ThreadGroup::require_own(Rank rank, const GroupWait& wait) const {
  require_own(rank, [&] {
    const Lock lock(mutex());
    return wait.describe();
  });
}

// A thread of another rank must not use the rank's group or works.
void ThreadGroup::require_own(Rank rank, const std::function<std::string()>& describe) const {
  const Rank mine = launch_ranks_[rank], caller = scheduler_->rank_of_thread();
  if (caller < 0 || caller == mine) return;
  throw CollectiveError(text(
      describe(), ": rank ", caller, " of the launch used group '", name_, "' as rank ", mine,
      " has it; each rank has process groups of its own, so an object that holds one must not be "
      "shared between ranks (a global variable, or a module's default argument, that one rank "
      "has set)"));
}

void ThreadGroup::require_healthy(Rank rank, const std::string& operation) const {
  const GilRelease gil_release;
  require_own(rank, [&] { return operation; });
  scheduler_->require_turn(launch_ranks_[rank], operation);
  const Lock lock(mutex());
  if (aborted_) std::rethrow_exception(cause(operation));
}

void ThreadGroup::abort(Rank rank, const std::string& why) {
  const GilRelease gil_release;
  Lock lock(mutex());
  if (!aborted_)
    abort(lock, AbortKind::peer_lost, text("rank ", rank, " aborted the group: ", why));
}

void ThreadGroup::abort(AbortKind kind, const std::string& cause) {
  Lock lock(mutex());
  abort(lock, kind, cause);
}

void ThreadGroup::abort(Lock& lock, AbortKind kind, const std::string& why) {
  if (aborted_) return;
  aborted_ = true;
  abort_ = scheduler_->abort_or({kind, why});
  auto pending = std::exchange(joint_calls_, {});
  lock.unlock();
  mailbox_->fail_all([&](const std::string& of) { return cause(of); });
  for (const JointCall& joint : pending) complete_all(finish(joint, error_of_abort()));
  pending.clear();  // releases tensors, without the mutex
  lock.lock();
  scheduler_->notify();
}

std::exception_ptr ThreadGroup::cause(const std::string& operation) const {
  const bool is_named = operation.empty() || abort_.cause.starts_with(operation);
  const std::string why = is_named ? abort_.cause : text(operation, ": ", abort_.cause);
  return rank_threads::make_abort_error(abort_.kind, why);
}

}  // namespace pycollect::dist
