// See backend.h: creating a group, adding calls to its queue, and the end of a group.
#include "backend.h"

#include <algorithm>
#include <set>
#include <thread>

#include "../../plan/error.h"
#include "../../rank_threads/scheduler.h"
#include "call_runner.h"
#include "interpreter.h"

namespace pycollect::dist {
namespace {

std::shared_ptr<RankCommunicator> connect(const StorePtr& store, RankAndWorld me,
                                          const Options& options) {
  if (const auto scheduler = rank_threads::RankScheduler::of_thread())
    return connect_threads(scheduler, store, me, options);
  return connect_processes(store, me, options);
}

}  // namespace

Backend::Backend(const StorePtr& store, RankAndWorld me, OptionsPtr options)
    : c10d::Backend(me.rank, me.world),
      me_(me),
      options_(std::move(options)),
      order_(order_named(options_->order, "pycollect.distributed.options")),
      timeout_ms_(options_->timeout.count()),
      communicator_(connect(store, me, *options_)),
      last_split_(c10::intrusive_ptr<c10d::Backend>()) {
  init();
  register_backend();
}

std::shared_ptr<SymmetricHeapAllocator> Backend::allocator() const {
  fork_guard_.require_not_forked("allocate_tensor");
  if (auto allocator = communicator_->allocator()) return allocator;
  throw group_destroyed("allocate_tensor");
}

// A negative index means the CPU, any other a CUDA device.
bool Backend::supportsTensorAlloc(c10::DeviceIndex index) {
  const at::Device device = index < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, index);
  if (fork_guard_.forked()) return false;  // in a forked child, an absent thread may hold a lock
  return communicator_->has_symmetric_memory(device);
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const at::Device device = options.device();
  require(device.is_cpu() || device.is_cuda(), "allocate_tensor: a tensor on ", device,
          " cannot lie in memory that ranks share; pass device='cpu'");
  require(size >= 0, "allocate_tensor: the size is ", size, "; it must not be negative");
  fork_guard_.require_not_forked("allocate_tensor");
  return communicator_->new_symmetric(device, size, c10::typeMetaToScalarType(options.dtype()));
}

void Backend::abort() {
  if (fork_guard_.forked()) return;
  coalescing_->close();
  communicator_->abort("abort() was called");
}

c10d::ErrorType Backend::getError() {
  if (fork_guard_.forked()) return c10d::ErrorType::COMM_ERROR;
  try {
    communicator_->require_healthy({"get_error", calls_, ipc::Clock::now()});
    return c10d::ErrorType::SUCCESS;
  } catch (const Timeout&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const std::exception&) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  require(timeout.count() >= 0, "set_timeout: ", timeout.count(), " ms; it must not be negative");
  timeout_ms_ = timeout.count();
  options_->timeout = timeout;
}

CollectiveWorkPtr Backend::new_work(const CallParams& info, uint64_t number) const {
  const bool given = is_limit(info.timeout);
  const std::string& wanted = options_->algorithm;
  const bool has_wanted = !wanted.empty() && has_algorithm(info.collective, wanted);
  return c10::make_intrusive<CollectiveWork>([&]() -> GroupCall {
    return {.collective = info.collective,
            .name = info.name,
            .number = number,
            .algorithm = has_wanted ? std::string_view(wanted) : std::string_view(),
            .order = order_,
            .communicator = communicator_.get(),
            .timeout = given ? info.timeout : std::chrono::milliseconds(timeout_ms_)};
  });
}

// Enqueues the refusal in place of the refused call.
void Backend::publish_refusal(const Refusal& refusal, const CallParams& info) {
  if (refusal.published.empty()) return;
  const CollectiveWorkPtr work = new_work(info);
  work->call().refusal = truncated(refusal.published);
  communicator_->run(work);
}

// Builds the call. Returns a refusal if an argument is invalid; all ranks raise the same message.
std::optional<Refusal> Backend::try_build(const CallParams& info, const char* prefix,
                                          GroupCall& call, Build build) const {
  const auto published = [&](std::string_view why) {
    const std::string operation = text(info.name, ": ");
    if (why.starts_with(operation)) why.remove_prefix(operation.size());
    return text(prefix, pycollect::name(info.collective), ": ", why);
  };
  const auto raised = [&](std::string_view why) {
    return text("rank ", me_.rank, " refused ", published(why));
  };
  try {
    build(call);
    return std::nullopt;
  } catch (const TypeError& error) {
    const std::string why = error.what();
    return Refusal{published(why), std::make_exception_ptr(TypeError(raised(why)))};
  } catch (const std::invalid_argument& error) {
    const std::string why = error.what();
    return Refusal{published(why), std::make_exception_ptr(std::invalid_argument(raised(why)))};
  } catch (const std::exception& error) {
    return Refusal{published(error.what()), std::current_exception()};
  }
}

WorkPtr Backend::collective(const CallParams& info, Build build) {
  const InFlightGuard in_flight;
  fork_guard_.require_not_forked(info.name);
  // Refused calls count as well: call numbers must agree across ranks.
  CollectiveWorkPtr work = new_work(info, calls_++);
  if (CoalescedList* const list = coalescing_->find()) return coalesce(*list, info, work, build);
  GroupCall& call = work->call();
  if (const auto refusal = try_build(info, "", call, build)) {
    publish_refusal(*refusal, info);
    std::rethrow_exception(refusal->error);
  }
  call.event = ProfilerEvent::begin(info.name, info.inputs);
  if (info.async)
    communicator_->push_all({work});
  else
    communicator_->run(work);
  return work;
}

// torch calls this once per device type with one store; both calls must return the same group.
c10::intrusive_ptr<c10d::Backend> Backend::split(
    const StorePtr& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  fork_guard_.require_not_forked("split");
  const auto mine = std::find(ranks.begin(), ranks.end(), me_.rank);
  if (mine == ranks.end()) return {};
  if (auto last = last_split_.lock(); last && last_split_name_ == options->group_name) return last;
  const auto* given = dynamic_cast<const dist::Options*>(options.get());
  auto own = c10::make_intrusive<dist::Options>(given != nullptr ? *given : *options_);
  own->timeout = options->timeout;
  own->group_name = options->group_name;
  own->is_default = false;
  const RankAndWorld me{static_cast<Rank>(mine - ranks.begin()), static_cast<int>(ranks.size())};
  auto made = c10::make_intrusive<Backend>(store->clone(), me, std::move(own));
  last_split_ = c10::weak_intrusive_ptr<c10d::Backend>(made);
  last_split_name_ = options->group_name;
  return made;
}

// The collective methods of c10d::Backend; each calls a builder of builders.h.
namespace {

at::TensorList list_of(const TensorLists& lists) {
  return lists.empty() ? at::TensorList() : at::TensorList(lists.front());
}

}  // namespace

WorkPtr Backend::all_reduce(at::TensorList tensors, const c10d::AllreduceOptions& o) {
  return collective({Collective::all_reduce, "all_reduce", o.timeout, o.asyncOp, tensors},
                    [&](GroupCall& call) { dist::all_reduce(call, me_, tensors, o.reduceOp); });
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) {
  return collective({Collective::all_reduce, "all_reduce_coalesced", o.timeout, o.asyncOp, tensors},
                    [&](GroupCall& call) { dist::all_reduce(call, me_, tensors, o.reduceOp); });
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
  return collective(
      {Collective::reduce, "reduce", o.timeout, o.asyncOp, tensors},
      [&](GroupCall& call) { dist::reduce(call, me_, tensors, o.reduceOp, o.rootRank); });
}

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
  return collective({Collective::broadcast, "broadcast", o.timeout, o.asyncOp, tensors},
                    [&](GroupCall& call) { dist::broadcast(call, me_, tensors, o.rootRank); });
}

namespace {

void bind_barrier(GroupCall& call) {
  call.requests.push_back({.collective = Collective::barrier, .tensors = 0});
}

}  // namespace

WorkPtr Backend::barrier(const c10d::BarrierOptions& o) {
  return collective({Collective::barrier, "barrier", o.timeout, o.asyncOp}, bind_barrier);
}

namespace {

// Returns what torch's ProcessGroupGloo says if `missing` have not come to a monitored barrier. On
// several hosts rank 0 may not know them.
std::string monitored_barrier_failure(Rank me, const std::vector<Rank>& missing,
                                      std::chrono::milliseconds timeout, bool names_all) {
  if (me != 0)
    return text("Rank ", me,
                " successfully reached monitoredBarrier, but received errors while "
                "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.");
  if (missing.empty() || timeout.count() == 0)
    return text("Rank 0 timed out in monitoredBarrier after ", timeout.count(), " ms.");
  std::string ranks = text(missing.front());
  for (std::size_t i = 1; names_all && i < missing.size(); ++i) ranks += text(", ", missing[i]);
  return text(names_all && missing.size() > 1 ? "Ranks " : "Rank ", ranks,
              " failed to pass monitoredBarrier in ", timeout.count(), " ms.");
}

}  // namespace

// The second part of the error names all missing ranks, with or without `wait_all_ranks`.
void Backend::monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) {
  using std::chrono::milliseconds;
  const milliseconds timeout = o.timeout.count() < 0 ? milliseconds(timeout_ms_) : o.timeout;
  const auto failure = [&](const std::exception& error) {
    const std::vector<Rank> missing = communicator_->behind();
    return text(monitored_barrier_failure(me_.rank, missing, timeout, wait_all_ranks), ' ',
                error.what());
  };
  try {
    const auto work = collective(
        {Collective::barrier, "monitored_barrier", std::max(timeout, milliseconds(1)), false},
        bind_barrier);
    if (work) work->wait();  // null: the call is coalesced; endCoalescing() returns its work
  } catch (const Timeout& error) {
    throw Timeout(failure(error));
  } catch (const PeerLost& error) {
    throw PeerLost(failure(error));
  }
}

WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) {
  return collective({Collective::all_gather, "all_gather", o.timeout, o.asyncOp, inputs},
                    [&](GroupCall& call) {
                      dist::all_gather(call, me_, {"input", inputs, "output_list", &outputs});
                    });
}

// The output lists of allgather_coalesced are indexed [rank][tensor].
WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& o) {
  return collective({Collective::all_gather, "all_gather_coalesced", o.timeout, o.asyncOp, inputs},
                    [&](GroupCall& call) {
                      require(static_cast<int>(outputs.size()) == me_.world, call.name, ": ",
                              outputs.size(), " output lists were passed for ", me_.world,
                              " ranks; pass one for each rank");
                      TensorLists by_tensor(inputs.size());
                      for (const Tensors& of_rank : outputs) {
                        require(of_rank.size() == inputs.size(), call.name, ": an output list has ",
                                of_rank.size(), " tensors for ", inputs.size(),
                                " inputs; pass one tensor for each input");
                        for (std::size_t i = 0; i < inputs.size(); ++i)
                          by_tensor[i].push_back(of_rank[i]);
                      }
                      dist::all_gather(call, me_, {"input", inputs, "output_list", &by_tensor});
                    });
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& o) {
  return collective({Collective::all_gather, "all_gather_into_tensor", o.timeout, o.asyncOp, input},
                    [&](GroupCall& call) {
                      dist::all_gather(call, me_, {"input", input, "output", {}, output});
                    });
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& o) {
  return collective(
      {Collective::all_gather, "all_gather_into_tensor_coalesced", o.timeout, o.asyncOp, inputs},
      [&](GroupCall& call) {
        dist::all_gather(call, me_, {"input", inputs, "output", {}, outputs});
      });
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                const c10d::ReduceScatterOptions& o) {
  return collective(
      {Collective::reduce_scatter, "reduce_scatter", o.timeout, o.asyncOp, list_of(inputs)},
      [&](GroupCall& call) {
        dist::reduce_scatter(call, me_, {"output", outputs, "input_list", &inputs}, o.reduceOp);
      });
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& o) {
  return collective(
      {Collective::reduce_scatter, "reduce_scatter_tensor", o.timeout, o.asyncOp, input},
      [&](GroupCall& call) {
        dist::reduce_scatter(call, me_, {"output", output, "input", {}, input}, o.reduceOp);
      });
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& o) {
  return collective(
      {Collective::reduce_scatter, "reduce_scatter_tensor_coalesced", o.timeout, o.asyncOp, inputs},
      [&](GroupCall& call) {
        dist::reduce_scatter(call, me_, {"output", outputs, "input", {}, inputs}, o.reduceOp);
      });
}

WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& o) {
  return collective(
      {Collective::gather, "gather", o.timeout, o.asyncOp, inputs}, [&](GroupCall& call) {
        dist::gather(call, me_, {"tensor", inputs, "gather_list", &outputs}, o.rootRank);
      });
}

WorkPtr Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                    const c10d::GatherOptions& o) {
  return collective({Collective::gather, "gather_into_tensor", o.timeout, o.asyncOp, input},
                    [&](GroupCall& call) {
                      dist::gather(call, me_, {"input", input, "output", {}, output}, o.rootRank);
                    });
}

WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& o) {
  return collective({Collective::scatter, "scatter", o.timeout, o.asyncOp, list_of(inputs)},
                    [&](GroupCall& call) {
                      dist::scatter(call, me_, {"tensor", outputs, "scatter_list", &inputs},
                                    o.rootRank);
                    });
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) {
  return collective({Collective::all_to_all, "all_to_all", o.timeout, o.asyncOp, inputs},
                    [&](GroupCall& call) { dist::all_to_all(call, me_, outputs, inputs); });
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_sizes,
                               std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& o) {
  return collective({Collective::all_to_all, "all_to_all_single", o.timeout, o.asyncOp, input},
                    [&](GroupCall& call) {
                      dist::all_to_all_single(call, me_, output, input,
                                              {output_sizes, input_sizes});
                    });
}

WorkPtr Backend::message(bool receives, const Tensors& tensors, std::optional<Rank> peer, int tag) {
  const char* const name = receives ? "recv" : "send";
  fork_guard_.require_not_forked(name);
  communicator_->require_open(name);
  const auto op = [&]() -> P2POp {
    require(tensors.size() == 1, name, ": ", tensors.size(), " tensors were passed; pass 1");
    return {tensors[0], peer, tag, std::chrono::milliseconds(timeout_ms_), receives};
  };
  if (CoalescedList* const list = coalescing_->find()) return coalesce(*list, op);
  return communicator_->post(op());
}

WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  return message(false, tensors, to, tag);
}
WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  return message(true, tensors, from, tag);
}
WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return message(true, tensors, std::nullopt, tag);
}

namespace {

// Shutdown timeout: the time for fire-and-forget calls to finish before the group is aborted. Much
// longer than they take with all ranks present, much shorter than users wait for an exit.
constexpr std::chrono::milliseconds kShutdownTimeout{5000};
// Time limit for threads that wake when the groups close, and then only raise an error. Threads
// that close a group themselves have the shutdown timeout before that.
constexpr std::chrono::milliseconds kWakeTimeout{1000};

// Every backend of this process, for close_groups().
struct LiveBackends {
  std::mutex mutex;
  std::set<Backend*> all;
};
LiveBackends& live_backends() {
  static auto* const one = new LiveBackends;  // never freed: backends may be destroyed late
  return *one;
}

}  // namespace

void Backend::register_backend() {
  const std::lock_guard lock(live_backends().mutex);
  live_backends().all.insert(this);
}

Backend::~Backend() {
  if (fork_guard_.forked()) {
    // Deliberate leak in a forked child: the parent's locks and threads must not be destroyed.
    new auto(std::make_pair(std::move(communicator_), std::move(coalescing_)));
    return;
  }
  const InFlightGuard in_flight;  // counts until this thread has retaken the GIL
  const SignalsDeferred deferred;
  const GilRelease gil_release;
  {
    const std::lock_guard lock(live_backends().mutex);
    live_backends().all.erase(this);
  }
  communicator_->close(ipc::Clock::now() + kShutdownTimeout);
}

// Throws what a signal handler raised meanwhile.
void Backend::shutdown() {
  const InFlightGuard in_flight;
  if (fork_guard_.forked()) return;
  const GilRelease gil_release;
  if (const auto raised = communicator_->close(ipc::Clock::now() + kShutdownTimeout))
    std::rethrow_exception(raised);
  communicator_->await_end_of_store();
}

// A callback may drop the last reference to a group, whose destructor locks this mutex; so the
// groups are closed without the lock. All make progress meanwhile, and share one shutdown timeout.
bool close_groups() {
  const bool any_in_flight = InFlightGuard::any();
  std::vector<c10::intrusive_ptr<Backend>> all;
  {
    const std::lock_guard lock(live_backends().mutex);
    for (Backend* b : live_backends().all)  // null: its destructor has begun
      if (Backend* held = c10::raw::weak_intrusive_ptr::lock(b))
        all.push_back(c10::intrusive_ptr<Backend>::reclaim(held));
  }
  const auto deadline = ipc::Clock::now() + kShutdownTimeout;
  const SignalsDeferred deferred;
  for (const auto& b : all)
    if (!b->fork_guard_.forked()) b->communicator_->close(deadline);
  const auto wake_deadline = std::max(ipc::Clock::now(), deadline) + kWakeTimeout;
  while (InFlightGuard::any() && ipc::Clock::now() < wake_deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return any_in_flight;
}

}  // namespace pycollect::dist
