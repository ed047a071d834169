// See runner.h. What a call does not come to because of an error, no rank comes to.
#include "runner.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <thread>

#include "../../plan/error.h"
#include "../threads.h"

namespace pycollect::dist {

cpu::ParallelFor threads_of_rank(int ranks) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  const int share = std::max(1, cores / ranks);
  return [share](int64_t size, int64_t grain, const cpu::Body& body) {
    const int64_t most = std::min(share, at::get_num_threads());
    if (most <= 1 || size <= grain) return body(0, size);
    threads()(size, std::max(grain, (size + most - 1) / most), body);
  };
}

std::string shortened(std::string_view why) {
  constexpr std::size_t kMost = std::tuple_size_v<decltype(shm::Description::refusal)> - 1;
  constexpr std::string_view kMore = " ...";
  if (why.size() <= kMost) return std::string(why);
  const std::size_t end = why.rfind(' ', kMost - kMore.size());
  return text(why.substr(0, end == why.npos ? kMost - kMore.size() : end), kMore);
}

void refuse_for(Call& call, const std::exception& why) {
  call.refusal = shortened(text(pycollect::name(call.collective), ": ", why.what()));
}

// The caller has its error, and does not want another one.
void Runner::refuse(const Call& call, shm::Deadline deadline) {
  try {
    shm::refuse(*group_, call.collective, calls_++, deadline, call.refusal);
  } catch (const std::exception&) {
    // The group is broken, and the next call says so.
  }
}

std::vector<Rank> Runner::missing() const {
  const auto done_by = [&](Rank r) { return group_->line(r).done.load(std::memory_order_relaxed); };
  const uint64_t own = done_by(group_->rank());
  const uint64_t entered = shm::at_run(own >> shm::kTaskBits) + 1;
  std::vector<Rank> ranks;
  if (!shm::reached(own, entered)) return ranks;  // nothing runs
  for (Rank r = 0; r < group_->world(); ++r)
    if (!shm::reached(done_by(r), entered)) ranks.push_back(r);
  return ranks;
}

// A stream that is held up holds up its rank, and the time limit is the call's; when the device
// fails, the other ranks need not wait for it.
void Runner::await_arrival(Call& call, Passage& passage, shm::Deadline deadline) {
  try {
    group_->await([&] { return passage.arrived(); },
                  [&] { return std::vector<Rank>{group_->rank()}; },
                  {pycollect::name(call.collective), calls_, deadline});
  } catch (const CollectiveError&) {
    throw;
  } catch (const std::exception& error) {
    refuse_for(call, error);
    refuse(call, deadline);
    throw;
  }
}

namespace {

// Behind the results of the calls before it, on the streams where those land, which have to do with
// its tensors from then on.
void depart_in_turn(Call& call) {
  Passage& passage = *call.passage;
  Devices& devices = passage.devices();
  for (std::size_t i = 0; i < call.asked.size(); ++i) {
    devices.follow(passage.on()[i], *call.asked[i]);
    devices.finish(passage.on()[i], {}, call.held);
  }
  devices.with_results(passage.on(), [&] {
    for (const auto& fill : call.fills) fill();
    passage.depart();
  });
}

}  // namespace

// The results of calls before it are what it reads. Nobody waits for a rank that has no memory.
void Runner::fill(Call& call, shm::Deadline deadline) {
  try {
    if (!call.asked.empty()) return depart_in_turn(call);
    for (const auto& fill : call.fills) fill();
  } catch (const std::exception& error) {
    refuse_for(call, error);
    refuse(call, deadline);
    throw;
  }
}

void Runner::run(Call& call) {
  const shm::Deadline deadline = shm::deadline_after(call.timeout);
  if (!call.refusal.empty()) return refuse(call, deadline);
  agree_on_all(call, deadline);
  fill(call, deadline);
  if (!call.passage) return perform(call, deadline);
  await_arrival(call, *call.passage, deadline);
  const shm::Occasion occasion{pycollect::name(call.collective), calls_, deadline};
  try {
    perform(call, deadline);
  } catch (...) {
    call.passage->cut_short(occasion);
    throw;
  }
  call.passage->land(occasion);
}

// Either everything runs that its caller takes for one, or nothing: several dtypes in a call, and
// calls that were coalesced; but for a rank that has no memory when it comes to one. What is one
// request is agreed on when it runs.
void Runner::agree_on_all(Call& call, shm::Deadline deadline) {
  if (call.together) {
    Together& all = *call.together;
    if (all.error) std::rethrow_exception(all.error);
    if (std::exchange(all.agreed, true)) return;
    try {
      for (const auto& passage : all.passages) await_arrival(call, *passage, deadline);
      agree(all.requests, deadline);
    } catch (...) {
      all.error = std::current_exception();
      throw;
    }
  } else if (call.requests.size() > 1) {
    std::vector<Together::Bound> own;
    for (const shm::Request& request : call.requests) own.push_back({&request, &transport(call)});
    agree(own, deadline);
  }
}

void Runner::agree(const std::vector<Together::Bound>& bound, shm::Deadline deadline) {
  std::vector<const shm::Request*> requests;
  for (const auto& [request, transport] : bound) {
    try {
      shm::check(transport == nullptr ? host_ : *transport, *request);
    } catch (const std::invalid_argument& error) {
      const Collective collective = request->collective;
      shm::refuse(*group_, collective, calls_++, deadline,
                  shortened(text(pycollect::name(collective), ": ", error.what())));
      throw;
    }
    requests.push_back(request);
  }
  shm::agree_on_all(*group_, requests, calls_, deadline);
}

shm::Transport& Runner::transport(const Call& call) {
  shm::Transport* const own = call.passage ? call.passage->transport() : nullptr;
  return own == nullptr ? host_ : *own;
}

void Runner::perform(Call& call, shm::Deadline deadline) {
  for (const shm::Request& request : call.requests)
    shm::run(transport(call), request, calls_++, deadline);
  for (const auto& [to, from] : call.copies) lay(to, from);
  if (call.then) call.then({call.name, calls_ - 1, deadline});
}

}  // namespace pycollect::dist
