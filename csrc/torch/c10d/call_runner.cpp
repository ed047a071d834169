// See call_runner.h. A rank that cannot continue a call publishes a refusal in place of the call's
// next request. All ranks then skip the rest of the call, so their call numbers stay equal.
#include "call_runner.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "../../plan/error.h"
#include "../threads.h"
#include "sparse.h"

namespace pycollect::dist {

cpu::ParallelFor threads_of_rank(int share) {
  return [share](int64_t size, int64_t grain, const cpu::Body& body) {
    const int64_t most = std::min(share, at::get_num_threads());
    if (most <= 1 || size <= grain) return body(0, size);
    threads()(size, std::max(grain, (size + most - 1) / most), body);
  };
}

std::string truncated(std::string_view why) {
  constexpr std::size_t kMaxLength =
      std::tuple_size_v<decltype(ipc::FingerprintDetails::refusal)> - 1;
  constexpr std::string_view kEllipsis = " ...";
  if (why.size() <= kMaxLength) return std::string(why);
  const std::size_t end = why.rfind(' ', kMaxLength - kEllipsis.size());
  return text(why.substr(0, end == why.npos ? kMaxLength - kEllipsis.size() : end), kEllipsis);
}

void refuse_for(GroupCall& call, const std::exception& why) {
  call.refusal = truncated(text(pycollect::name(call.collective), ": ", why.what()));
}

void coalesce(const std::vector<CollectiveWorkPtr>& works) {
  if (works.size() < 2) return;
  const auto coalesced = std::make_shared<CoalescedRequests>();
  for (const CollectiveWorkPtr& work : works) {
    GroupCall& call = work->call();
    for (const ipc::CollectiveRequest& request : call.requests)
      coalesced->requests.push_back(&request);
    if (call.staging && call.requested_at.empty()) coalesced->stagings.push_back(call.staging);
    call.coalesced = coalesced;
  }
}

// Publishes the call's refusal. Drops errors, because the caller gets the reason for the refusal.
void CallRunner::refuse(const GroupCall& call, ipc::Deadline deadline) {
  try {
    executor_->refuse(call.collective, calls_++, deadline, call.refusal);
  } catch (const ipc::Interruption&) {
    throw;
  } catch (const std::exception&) {
    // The group is aborted, and its next call throws that error.
  }
}

std::vector<Rank> CallRunner::missing() const {
  const auto done_by = [&](Rank r) {
    return group_->rank_state(r).progress.load(std::memory_order_relaxed);
  };
  const uint64_t own = done_by(group_->rank());
  const uint64_t entered = ipc::at_run(group_->call_begin()) + 1;
  std::vector<Rank> ranks;
  if (!ipc::reached(own, entered)) return ranks;  // no call is running
  for (Rank r = 0; r < group_->world(); ++r)
    if (!ipc::reached(done_by(r), entered)) ranks.push_back(r);
  return group_->world_ranks(ranks);
}

// What fails in `act`, such as a device or a lack of memory, is published as a refusal, so that the
// peers do not wait for this rank. They know of what ends the group.
void CallRunner::or_refuse(GroupCall& call, ipc::Deadline deadline, c10::function_ref<void()> act) {
  try {
    act();
  } catch (const CollectiveError&) {
    throw;
  } catch (const ipc::Interruption&) {
    throw;
  } catch (const std::exception& error) {
    refuse_for(call, error);
    refuse(call, deadline);
    throw;
  }
}

// Waits for the caller's streams, up to the call's timeout.
void CallRunner::await_inputs(GroupCall& call, TensorStaging& staging, ipc::Deadline deadline) {
  or_refuse(call, deadline, [&] {
    group_->await([&] { return staging.inputs_ready(); },
                  {.missing = [&] { return std::vector<Rank>{group_->rank()}; }},
                  {pycollect::name(call.collective), calls_, deadline});
  });
}

namespace {

// Copies the tensors into staging on the group's streams, after the results of earlier calls. From
// then on, these streams use the tensors' memory.
void copy_in_after_earlier_calls(GroupCall& call) {
  TensorStaging& staging = *call.staging;
  DeviceOps& devices = staging.devices();
  for (std::size_t i = 0; i < call.requested_at.size(); ++i) {
    devices.wait_for(staging.on()[i], *call.requested_at[i]);
    devices.finish(staging.on()[i], {}, {call.held.begin(), call.held.end()});
  }
  devices.with_group_streams(staging.on(), [&] {
    for (const auto& fill : call.fills) fill();
    staging.begin_copy_in();
  });
}

}  // namespace

// Computes temporary inputs and starts delayed copies into staging, after the earlier calls, whose
// results they may use.
void CallRunner::fill(GroupCall& call, ipc::Deadline deadline) {
  if (call.fills.empty() && call.requested_at.empty()) return;
  or_refuse(call, deadline, [&] {
    if (!call.requested_at.empty()) return copy_in_after_earlier_calls(call);
    for (const auto& fill : call.fills) fill();
  });
}

// A rank that a signal handler has taken out of a call cannot continue it.
void CallRunner::run(GroupCall& call) {
  try {
    run(call, ipc::deadline_after(call.timeout));
  } catch (const ipc::Interruption&) {
    group_->abort(text("a signal interrupted it in ", call.name));
    throw;
  } catch (const CollectiveError&) {
    group_->leave_call();
    throw;
  }
}

void CallRunner::run(GroupCall& call, ipc::Deadline deadline) {
  if (!call.refusal.empty()) return refuse(call, deadline);
  agree_on_all(call, deadline);
  fill(call, deadline);
  if (!call.staging) return perform(call, deadline);
  await_inputs(call, *call.staging, deadline);
  perform(call, deadline);
  call.staging->begin_copy_out();
}

// Makes the ranks agree on all requests of a call with several dtypes, or of coalesced calls, so
// that all of them run or none. A rank may still run out of memory when it reaches a call. A single
// request is agreed on when it runs.
void CallRunner::agree_on_all(GroupCall& call, ipc::Deadline deadline) {
  if (call.coalesced) {
    CoalescedRequests& all = *call.coalesced;
    if (all.error) std::rethrow_exception(all.error);
    if (std::exchange(all.agreed, true)) return;
    try {
      for (const auto& staging : all.stagings) await_inputs(call, *staging, deadline);
      agree(all.requests, deadline);
    } catch (...) {
      all.error = std::current_exception();
      throw;
    }
  } else if (call.requests.size() > 1) {
    std::vector<const ipc::CollectiveRequest*> own;
    for (const ipc::CollectiveRequest& request : call.requests) own.push_back(&request);
    agree(own, deadline);
  }
}

void CallRunner::agree(const std::vector<const ipc::CollectiveRequest*>& requests,
                       ipc::Deadline deadline) {
  for (const ipc::CollectiveRequest* const request : requests) {
    try {
      executor_->check(*request);
    } catch (const std::invalid_argument& error) {
      const Collective collective = request->collective;
      executor_->refuse(collective, calls_++, deadline,
                        truncated(text(pycollect::name(collective), ": ", error.what())));
      throw;
    }
  }
  executor_->agree_on_all(requests, calls_, deadline);
}

void CallRunner::exchange_entries(GroupCall& call, ipc::Deadline deadline) {
  std::optional<ipc::CollectiveRequest> request;
  or_refuse(call, deadline, [&] { request = call.sparse->exchange(); });
  executor_->run(*request, calls_++, deadline);
}

void CallRunner::perform(GroupCall& call, ipc::Deadline deadline) {
  for (const ipc::CollectiveRequest& request : call.requests) {
    executor_->run(request, calls_++, deadline);
    if (request.sparse) exchange_entries(call, deadline);
  }
  // Last: the rank takes part in the call even if it fails.
  if (call.sparse) SparseSums::finish({call.sparse.get()});
  for (const auto& [to, from] : call.copies) copy_strided(to, from);
}

}  // namespace pycollect::dist
