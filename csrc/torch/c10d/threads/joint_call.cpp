// See joint_call.h. The requests that no rank's calls divide run together. The plan of matching
// requests has one binding if every buffer is contiguous. Else there is a binding for each range of
// elements that is contiguous on all ranks.
#include "joint_call.h"

#include <algorithm>
#include <numeric>

#include "../../../plan/error.h"
#include "../../../rank_executor/request.h"
#include "../../list_call.h"
#include "../../threads.h"
#include "../sparse.h"
#include "../staging.h"

namespace pycollect::dist {
namespace {

using ipc::BlockContent;
using ipc::BufferSpan;
using ipc::CallBuffer;
using ipc::CollectiveRequest;

using RankRequests = std::vector<const CollectiveRequest*>;  // [rank]

// One block of one buffer of one rank, read from its beginning.
class BlockCursor {
 public:
  BlockCursor(Rank rank, Buffer buffer, int block, const CallBuffer& memory, std::size_t item)
      : rank(rank), buffer(buffer), block(block), memory_(memory), item_(item) {
    const bool has_one = memory.blocks.size() == 1;  // which is the rank's own
    left_ = memory.blocks[has_one ? 0 : block];
    offset_ = has_one ? 0
                      : std::accumulate(memory.blocks.begin(), memory.blocks.begin() + block,
                                        std::size_t{0});
    next_span();
  }

  const Rank rank;
  const Buffer buffer;
  const int block;

  std::size_t left() const { return left_; }
  std::byte* at() const { return memory_.spans[span_].base + offset_ * item_; }
  // Returns the number of elements before the next span, or before the end of the block.
  std::size_t contiguous() const {
    return left_ == 0 ? 0 : std::min(left_, memory_.spans[span_].count - offset_);
  }
  void advance(std::size_t count) {
    left_ -= count;
    offset_ += count;
    next_span();
  }

 private:
  void next_span() {
    while (left_ > 0 && offset_ >= memory_.spans[span_].count)
      offset_ -= memory_.spans[span_++].count;
  }

  const CallBuffer& memory_;
  const std::size_t item_;
  std::size_t span_ = 0, offset_ = 0, left_ = 0;  // in elements
};

// Blocks with the same number of elements, which the plan moves together: the sources and the
// destinations of a block.
using MatchingBlocks = std::vector<BlockCursor>;

// The memory of one run of the plan.
struct RunMemory {
  std::vector<BufferMemory> buffers;  // [rank][buffer]
  std::vector<Sizes> in, out;         // [rank][block]: elements in the rank's input and output
  Sizes whole;                        // [block]: of which the inputs and outputs have some or all
};

// The matching requests of ranks that are threads of this process, as a plan on their memory.
class JointRequest {
 public:
  explicit JointRequest(const RankRequests& requests)
      : requests_(requests),
        first_(*requests.front()),
        world_(static_cast<int>(requests.size())),
        item_(item_bytes(first_.dtype)),
        input_(ipc::input_of(first_.collective, first_.in_place)),
        output_(ipc::output_of(first_.collective, first_.in_place)) {}

  // Adds the plan and its bindings to the call.
  void bind(ListCall& call) const;

 private:
  bool in_blocks() const { return input_ != BlockContent::nothing_in_blocks; }
  std::size_t bytes() const;
  bool is_contiguous() const;
  std::vector<std::vector<MatchingBlocks>> block_groups() const;
  void add(MatchingBlocks& blocks, Rank r, Buffer buffer, int block) const;
  RunMemory empty_run() const;
  void place(RunMemory& run, Rank r, Buffer buffer, std::byte* base) const;
  RunMemory whole() const;
  RunMemory take(std::vector<MatchingBlocks>& group) const;
  void bind(BoundPlan& plan, RunMemory run, ListCall& call) const;
  const CallBuffer& memory(Rank r, Buffer buffer) const {
    return buffer == Buffer::input ? requests_[r]->input : requests_[r]->output;
  }
  BlockContent content(Buffer buffer) const { return buffer == Buffer::input ? input_ : output_; }
  Sizes& sizes(RunMemory& run, Rank r, Buffer buffer) const {
    return buffer == Buffer::input ? run.in[r] : run.out[r];
  }

  const RankRequests& requests_;
  const CollectiveRequest& first_;
  const int world_;
  const std::size_t item_;
  const BlockContent input_, output_;
};

constexpr std::array kCallBuffers{Buffer::input, Buffer::output};

// Returns the size of the largest buffer of a rank.
std::size_t JointRequest::bytes() const {
  std::size_t most = 0;
  for (Rank r = 0; r < world_; ++r)
    for (const Buffer buffer : kCallBuffers) most = std::max(most, total(memory(r, buffer)));
  return most * item_;
}

bool JointRequest::is_contiguous() const {
  for (Rank r = 0; r < world_; ++r)
    for (const Buffer buffer : kCallBuffers)
      if (memory(r, buffer).spans.size() > 1) return false;
  return true;
}

// Adds a block if the rank has it.
void JointRequest::add(MatchingBlocks& blocks, Rank r, Buffer buffer, int block) const {
  const CallBuffer& m = memory(r, buffer);
  if (m.blocks.empty() || (content(buffer) == BlockContent::own_block && r != block)) return;
  blocks.emplace_back(r, buffer, block, m, item_);
}

// Returns groups of matching blocks, in which no buffer comes twice. In an all_to_all, group k has
// the blocks that each rank sends to the rank k places after it.
std::vector<std::vector<MatchingBlocks>> JointRequest::block_groups() const {
  std::vector<std::vector<MatchingBlocks>> groups;
  for (int k = 0; k < (in_blocks() ? world_ : 1); ++k) {
    std::vector<MatchingBlocks>& group = groups.emplace_back();
    if (first_.collective == Collective::all_to_all) {
      for (Rank from = 0; from < world_; ++from) {
        const Rank to = (from + k) % world_;
        MatchingBlocks& blocks = group.emplace_back();
        add(blocks, from, Buffer::input, to);
        add(blocks, to, Buffer::output, from);
      }
      continue;
    }
    MatchingBlocks& blocks = group.emplace_back();
    for (Rank r = 0; r < world_; ++r)
      for (const Buffer buffer : kCallBuffers) add(blocks, r, buffer, k);
  }
  return groups;
}

RunMemory JointRequest::empty_run() const {
  const Sizes none(in_blocks() ? world_ : 1);
  return {std::vector<BufferMemory>(static_cast<std::size_t>(world_) * kBuffers),
          std::vector<Sizes>(world_, none), std::vector<Sizes>(world_, none), none};
}

void JointRequest::place(RunMemory& run, Rank r, Buffer buffer, std::byte* base) const {
  const auto at = static_cast<std::size_t>(r) * kBuffers;
  run.buffers[at + static_cast<int>(buffer)] = {base, 0};
  if (first_.in_place) run.buffers[at + static_cast<int>(Buffer::output)] = {base, 0};
}

// Returns the memory of the run of a call whose buffers are contiguous.
RunMemory JointRequest::whole() const {
  RunMemory run = empty_run();
  for (Rank r = 0; r < world_; ++r)
    for (const Buffer buffer : kCallBuffers) {
      const CallBuffer& m = memory(r, buffer);
      if (m.blocks.empty()) continue;
      if (!m.spans.empty()) place(run, r, buffer, m.spans[0].base);
      const bool own = content(buffer) == BlockContent::own_block;
      for (std::size_t b = 0; b < m.blocks.size(); ++b) {
        const std::size_t block = own ? r : b;
        sizes(run, r, buffer)[block] = m.blocks[b];
        if (first_.collective != Collective::all_to_all) run.whole[block] = m.blocks[b];
      }
    }
  return run;
}

// Returns the memory of the next run on a group of matching blocks, and advances them beyond it.
RunMemory JointRequest::take(std::vector<MatchingBlocks>& group) const {
  RunMemory run = empty_run();
  for (MatchingBlocks& blocks : group) {
    if (blocks.empty()) continue;
    std::size_t count = blocks.front().contiguous();
    for (const BlockCursor& b : blocks) count = std::min(count, b.contiguous());
    if (count == 0) continue;
    for (BlockCursor& b : blocks) {
      place(run, b.rank, b.buffer, b.at());
      sizes(run, b.rank, b.buffer)[b.block] = count;
      if (first_.collective != Collective::all_to_all) run.whole[b.block] = count;
      b.advance(count);
    }
  }
  return run;
}

void JointRequest::bind(BoundPlan& plan, RunMemory run, ListCall& call) const {
  PlanOffsets offsets(plan.compiled.plan, run.whole, aligned_elements(item_));
  if (in_blocks())
    for (Rank r = 0; r < world_; ++r) {
      offsets.set(r, Buffer::input, run.in[r]);
      offsets.set(r, Buffer::output, run.out[r]);
    }
  call.bind(plan, std::move(offsets), std::move(run.buffers));
}

void JointRequest::bind(ListCall& call) const {
  const std::size_t most = bytes();
  const SelectionKey key{.collective = first_.collective,
                         .world = world_,
                         .bytes = most,
                         .dtype = first_.dtype,
                         .in_place = first_.in_place,
                         .order = first_.options.order};
  BoundPlan plan = call.make_plan(key, first_.algorithm, first_.root, first_.op);
  if (most == 0) return;
  if (is_contiguous()) {
    bind(plan, whole(), call);
  } else {
    auto groups = block_groups();
    const auto left = [](const std::vector<MatchingBlocks>& group) {
      return std::any_of(group.begin(), group.end(), [](const MatchingBlocks& blocks) {
        return !blocks.empty() && blocks.front().left() > 0;
      });
    };
    for (std::vector<MatchingBlocks>& group : groups)
      while (left(group)) bind(plan, take(group), call);
  }
  call.plans.push_back(std::move(plan));
  call.bytes += most;
}

// A loop that moves more bytes takes so long that torch's threads can wake meanwhile.
constexpr int64_t kSharedBytes = 64 << 20;

StreamOrdering* staging_of(const GroupCall& call) {
  return static_cast<StreamOrdering*>(call.staging.get());
}

// Computes temporary inputs, and copies device tensors that could not be copied at the time of the
// call, because an earlier call of the same list writes them.
void fill(const GroupCall& call) {
  if (StreamOrdering* const staging = staging_of(call)) {
    for (std::size_t i = 0; i < call.requested_at.size(); ++i)
      call.requested_at[i]->block_current(staging->on()[i]);
    for (const auto& compute : call.fills) compute();
    if (!call.requested_at.empty()) staging->begin_copy_in();
    return staging->wait_for_inputs();
  }
  for (const auto& compute : call.fills) compute();
}

// Runs the call on the ranks' threads, if some of them are awake, or on torch's.
void run_on_host(const ListCall& list_call, rank_threads::LoopShare& share) {
  list_call.run([&](int64_t size, int64_t grain, const cpu::Body& body) {
    if (size > kSharedBytes || !share.try_run(size, grain, body)) threads()(size, grain, body);
  });
}

// The requests of one rank, in the order of its calls.
class RequestCursor {
 public:
  explicit RequestCursor(const std::vector<GroupCall*>& calls) : calls_(calls) {}

  bool at_end() const { return call_ == calls_.size(); }
  GroupCall& call() const { return *calls_[call_]; }
  std::size_t left() const { return call().requests.size() - next_; }  // of this call
  const ipc::CollectiveRequest& request(std::size_t i) const { return call().requests[next_ + i]; }

  void begin() const {
    if (next_ == 0) fill(call());
  }
  // Ends the call after its last request.
  void advance(std::size_t count) {
    if (left() > count) {
      next_ += count;
      return;
    }
    for (const auto& [to, from] : call().copies) copy_strided(to, from);
    if (StreamOrdering* const staging = staging_of(call())) staging->begin_copy_out();
    ++call_;
    next_ = 0;
  }

 private:
  const std::vector<GroupCall*>& calls_;
  std::size_t call_ = 0, next_ = 0;
};

// Returns a call of the next `count` requests of each rank.
ListCall prepare(const std::vector<RequestCursor>& ranks, std::size_t count) {
  ListCall list_call{.name = pycollect::name(ranks.front().request(0).collective)};
  for (const RequestCursor& rank : ranks) {
    const StreamOrdering* const staging = staging_of(rank.call());
    list_call.devices.push_back(staging ? staging->on().at(0) : at::Device(at::kCPU));
    if (staging == nullptr) continue;
    require(staging->on().size() == 1, rank.call().name,
            ": the tensors of a rank are on several devices; pass tensors of one device");
    list_call.held.insert(list_call.held.end(), staging->tensors().begin(),
                          staging->tensors().end());
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (ranks.front().request(i).tensors == 0 || ranks.front().request(i).sparse) continue;
    RankRequests requests;
    for (const RequestCursor& rank : ranks) requests.push_back(&rank.request(i));
    JointRequest(requests).bind(list_call);
  }
  return list_call;
}

// Adds up the sparse tensors of the next `count` requests of each rank.
void sum_sparse(const std::vector<RequestCursor>& ranks, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (ranks.front().request(i).sparse == nullptr) continue;
    std::vector<SparseSums*> sums;
    for (const RequestCursor& rank : ranks) sums.push_back(rank.call().sparse.get());
    SparseSums::finish(sums);
  }
}

void run(const std::vector<RequestCursor>& ranks, const ListCall& list_call,
         rank_threads::LoopShare& share) {
  if (list_call.plans.empty()) return;
  const auto on_device = std::find_if(ranks.begin(), ranks.end(), [](const RequestCursor& rank) {
    return rank.call().staging != nullptr;
  });
  if (on_device != ranks.end())
    on_device->call().staging->devices().torch().run_list_call(list_call);
  else
    run_on_host(list_call, share);
}

}  // namespace

void run_jointly(const std::vector<std::vector<GroupCall*>>& calls,
                 rank_threads::LoopShare& share) {
  std::vector<RequestCursor> ranks(calls.begin(), calls.end());
  while (!ranks.front().at_end()) {
    std::size_t count = ranks.front().left();
    for (const RequestCursor& rank : ranks) count = std::min(count, rank.left());
    for (const RequestCursor& rank : ranks) rank.begin();
    sum_sparse(ranks, count);
    run(ranks, prepare(ranks, count), share);
    for (RequestCursor& rank : ranks) rank.advance(count);
  }
}

}  // namespace pycollect::dist
