// See executor.h. All ranks agree on a call before any output is written. The path of a repeated
// small call allocates no memory.
#include "executor.h"

#include <utility>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

PreparationSettings settings_of(const Group& group) {
  const SegmentSizes& sizes = group.layout().sizes;
  return {sizes.buffer_bytes, sizes.symmetric_heap_bytes > 0};
}

// Fetches a cache line that this core is going to write. The compiler's own prefetch for writing is
// one for reading unless it may assume the instruction, and does nothing for a line of which this
// core has a copy that others share. Processors without the instruction ignore it.
void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

// Prefetches the cache lines that this rank is going to write and that peers have read: fetching
// them takes as long as the rest of the call up to the first write. Of a staging buffer only where
// one line is all of the data: the copy of more data fetches lines side by side, and a line that is
// fetched before them makes it 4 % slower.
void prefetch_shared(const Group& group, const CollectiveRequest& request, const OpContext& context,
                     uint64_t run) {
  constexpr std::size_t kLine = 64;
  prefetch_to_write(&group.own_entry(context.call));
  const auto& data = request.input.spans;
  const std::size_t bytes = data.empty() ? 0 : data[0].count * item_bytes(request.dtype);
  if (bytes > CallEntry::kDataBytes && bytes <= kLine)
    prefetch_to_write(group.staging_buffer(group.rank(), run));
}

}  // namespace

RankExecutor::RankExecutor(Group& group, cpu::ParallelFor parallel_for)
    : group_(group),
      cache_({group.rank(), group.world()}, settings_of(group)),
      program_(group, std::move(parallel_for)) {}

// Without zero-copy, this rank copies the first piece into its staging buffer before the ranks have
// agreed, so that one signal publishes both the fingerprint and the data.
void RankExecutor::run(const CollectiveRequest& request, uint64_t call, Deadline deadline) {
  if (request.tensors == 0) return agree(request, fingerprint_of(request, call), deadline);
  const OpContext context = begin(request, call, deadline);
  const uint64_t first = group_.run_number();
  prefetch_shared(group_, request, context, first);
  const PreparedRequest& prepared = prepare(request, context);
  CallFingerprint mine = numbered(prepared.common, call);
  if (prepared.in_tensors) mine.set_registered(find_registered(request, *prepared.in_tensors));
  await_turn(group_, first, context);
  const bool copies = !mine.has(Fingerprint::zero_copy);
  const int tasks =  // the first task of every run is its entry
      copies ? abort_on_error(group_, context, [&] { return program_.fill(first); }) : 1;
  enter(group_, mine, at_run(first) + tasks, &request);
  const Agreement agreed = await_agreement(mine, first, context, &program_);
  for (const auto& [ranks, regions] : unmapped_) group_.map_staging(ranks, regions);
  abort_on_error(group_, context, [&] {
    if (agreed.zero_copy)
      program_.use_tensors();
    else
      program_.cut(agreed.pieces);
    program_.run(first);
  });
  if (!request.part_of) group_.end_call(call + 1, first + program_.pieces().count);
}

// Begins a call, or a part of one.
inline OpContext RankExecutor::begin(const CollectiveRequest& request, uint64_t call,
                                     Deadline deadline) {
  const uint64_t shown = request.part_of ? request.part_of->number : call;
  const OpContext context{name(request.user_collective()), call, deadline, Deadline::max(), shown};
  if (request.part_of)
    group_.require_run(context);
  else
    group_.begin_call(context);
  return context;
}

// Every reason to refuse a request is found before the call is published, a lack of memory for the
// staging buffers, too.
inline const PreparedRequest& RankExecutor::prepare(const CollectiveRequest& request,
                                                    const OpContext& context) {
  unmapped_.clear();  // those of the last call are mapped or, if it has failed, may not exist
  try {
    const PreparedRequest& prepared = cache_.find(request);
    if (!prepared.reserved) {
      if (prepared.in_tensors) reserve(prepared, *prepared.in_tensors);
      reserve(prepared, *prepared.in_buffers);
      prepared.reserved = true;
    }
    program_.begin(prepared, request, context);
    return prepared;
  } catch (const std::exception& error) {
    publish_refusal(request.user_collective(), context,
                    text(name(request.user_collective()), ": ", error.what()));
    throw;
  }
}

// Commits the regions of the staging buffers that a program uses. In an irregular call, other ranks
// may need regions of another size.
void RankExecutor::reserve(const PreparedRequest& prepared, const BoundProgram& bound) {
  if (bound.stride == 0) return;
  const RankProgram& program = bound.program;
  const bool irregular = prepared.request.irregular && &bound == &*prepared.in_buffers;
  const auto regions = static_cast<std::size_t>(program.regions);
  const std::size_t stride = bound.stride;
  const std::size_t elements = std::min(bound.pieces.elements, bound.largest);
  const std::size_t bytes = std::min(elements * prepared.item(), stride);
  const auto commit = [&](const Group::StagingRegions& wanted) {
    if (group_.reserve_staging(program.fills, wanted) && !irregular)
      unmapped_.emplace_back(program.filled, wanted);
  };
  const std::size_t in_slots = bound.slots * bound.slot_bytes;
  if (in_slots > 0) return commit({.count = 1, .stride = in_slots, .bytes = in_slots});
  commit({.count = regions, .stride = stride, .bytes = bytes});
}

// Returns the registered offsets of the exposed buffers if each is contiguous and registered.
std::optional<RegisteredOffsets> RankExecutor::find_registered(const CollectiveRequest& request,
                                                               const BoundProgram& bound) const {
  const RankProgram& program = bound.program;
  RegisteredOffsets registered;
  const auto find = [&](const CallBuffer& buffer, bool exposed, uint64_t& at) {
    if (!exposed) return true;
    if (buffer.spans.size() != 1 || buffer.spans[0].base == nullptr) return false;
    at = static_cast<uint64_t>(buffer.spans[0].base - group_.heap(group_.rank()));
    // An address before the heap wraps around to a large offset.
    return at < group_.layout().sizes.symmetric_heap_bytes;
  };
  if (!find(request.input, program.exposes_input, registered.input) ||
      !find(request.in_place ? request.input : request.output, program.exposes_output,
            registered.output))
    return {};
  return registered;
}

// Awaits and compares the fingerprints. Throws std::invalid_argument on all ranks alike if they
// differ.
inline Agreement RankExecutor::await_agreement(const CallFingerprint& mine, uint64_t run,
                                               const OpContext& context, ProgramRun* data) {
  try {
    return await_entries(group_, mine, run, data != nullptr ? data->staged() : nullptr, context);
  } catch (const std::invalid_argument&) {
    if (data != nullptr) group_.advance(at_run(run + 1));
    throw;
  }
}

// The ranks agree in a run of its own that moves no data.
void RankExecutor::agree(const CollectiveRequest& request, const CallFingerprint& mine,
                         Deadline deadline) {
  const OpContext context = begin(request, mine.description.call, deadline);
  const uint64_t run = group_.run_number();
  await_turn(group_, run, context);
  enter(group_, mine, at_run(run + 1), &request);
  await_agreement(mine, run, context, nullptr);
  if (!request.part_of) group_.end_call(context.call + 1, run + 1);
}

void RankExecutor::check(const CollectiveRequest& request) {
  if (request.tensors != 0) cache_.find(request);
}

// One combined fingerprint shows whether all requests match. The ranks exchange a fingerprint of
// each request only if they do not match, and of an irregular request to compare its counts.
void CollectiveExecutor::agree_on_all(const std::vector<const CollectiveRequest*>& requests,
                                      uint64_t& calls, Deadline deadline) {
  const CollectiveRequest& first = *requests.front();
  const auto parts = static_cast<uint32_t>(requests.size());
  const auto exchange_part = [&](uint32_t i) {
    CallFingerprint mine = fingerprint_of(*requests[i], calls++);
    mine.description.part = i;
    mine.description.parts = parts;
    agree(*requests[i], mine, deadline);
  };
  const CallFingerprint all = fingerprint_of(requests, calls++);
  try {
    agree(first, all, deadline);
  } catch (const std::invalid_argument&) {
    if (!all_publish_as_many(all)) throw;
    for (uint32_t i = 0; i < parts; ++i) exchange_part(i);  // one of these throws
    throw;
  }
  for (uint32_t i = 0; i < parts; ++i)
    if (requests[i]->irregular) exchange_part(i);
}

void RankExecutor::publish_refusal(Collective collective, const OpContext& context,
                                   std::string_view why) {
  const uint64_t run = group_.run_number();
  const CallFingerprint refusal = refusal_of(collective, context.call);
  await_turn(group_, run, context);
  describe_refusal(group_.fingerprint_details(group_.rank(), context.call), why);
  enter(group_, refusal, at_run(run + 1));
}

void RankExecutor::refuse(Collective collective, uint64_t call, Deadline deadline,
                          std::string_view why) {
  const OpContext context{name(collective), call, deadline};
  group_.begin_call(context);
  publish_refusal(collective, context, why);
}

}  // namespace pycollect::ipc
