// See joint_call.h. The requests that no rank's calls divide run together.
#include "joint_call.h"

#include <algorithm>

#include "../../../plan/error.h"
#include "../../threads.h"
#include "../sparse.h"
#include "direct_staging.h"
#include "joint_request.h"

namespace pycollect::dist {
namespace {

// A loop that moves more bytes takes so long that torch's threads can wake meanwhile.
constexpr int64_t kSharedBytes = 64 << 20;

DirectStaging* staging_of(const GroupCall& call) {
  return static_cast<DirectStaging*>(call.staging.get());
}

// Computes temporary inputs, and copies device tensors that could not be copied at the time of the
// call, because an earlier call of the same list writes them.
void fill(const GroupCall& call) {
  if (DirectStaging* const staging = staging_of(call)) {
    for (std::size_t i = 0; i < call.requested_at.size(); ++i)
      call.requested_at[i]->block_current(staging->on()[i]);
    for (const auto& compute : call.fills) compute();
    if (!call.requested_at.empty()) staging->begin_copy_in();
    return staging->wait_for_inputs();
  }
  for (const auto& compute : call.fills) compute();
}

// Runs the call on the ranks' threads, if some of them are awake, or on torch's.
void run_on_host(const ListCall& joint, rank_threads::WorkShare& share) {
  joint.run([&](int64_t size, int64_t grain, const cpu::Body& body) {
    if (size > kSharedBytes || !share.try_run(size, grain, body)) threads()(size, grain, body);
  });
}

// The requests of one rank, in the order of its calls.
class RequestReader {
 public:
  explicit RequestReader(const std::vector<GroupCall*>& calls) : calls_(calls) {}

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
    if (DirectStaging* const staging = staging_of(call())) staging->begin_copy_out();
    ++call_;
    next_ = 0;
  }

 private:
  const std::vector<GroupCall*>& calls_;
  std::size_t call_ = 0, next_ = 0;
};

// Returns a call of the next `count` requests of each rank.
ListCall prepare(const std::vector<RequestReader>& ranks, std::size_t count) {
  ListCall joint{.name = pycollect::name(ranks.front().request(0).collective)};
  for (const RequestReader& rank : ranks) {
    const DirectStaging* const staging = staging_of(rank.call());
    joint.devices.push_back(staging ? staging->on().at(0) : at::Device(at::kCPU));
    if (staging == nullptr) continue;
    require(staging->on().size() == 1, rank.call().name,
            ": the tensors of a rank are on several devices; pass tensors of one device");
    joint.held.insert(joint.held.end(), staging->tensors().begin(), staging->tensors().end());
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (ranks.front().request(i).tensors == 0 || ranks.front().request(i).sparse) continue;
    RankRequests requests;
    for (const RequestReader& rank : ranks) requests.push_back(&rank.request(i));
    bind_jointly(requests, joint);
  }
  return joint;
}

// Adds up the sparse tensors of the next `count` requests of each rank.
void sum_sparse(const std::vector<RequestReader>& ranks, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (ranks.front().request(i).sparse == nullptr) continue;
    std::vector<SparseSums*> sums;
    for (const RequestReader& rank : ranks) sums.push_back(rank.call().sparse.get());
    SparseSums::finish_jointly(sums);
  }
}

void run(const std::vector<RequestReader>& ranks, const ListCall& joint,
         rank_threads::WorkShare& share) {
  if (joint.plans.empty()) return;
  const auto on_device = std::find_if(ranks.begin(), ranks.end(), [](const RequestReader& rank) {
    return rank.call().staging != nullptr;
  });
  if (on_device != ranks.end())
    on_device->call().staging->devices().torch().run_list_call(joint);
  else
    run_on_host(joint, share);
}

}  // namespace

void run_jointly(const std::vector<std::vector<GroupCall*>>& calls,
                 rank_threads::WorkShare& share) {
  std::vector<RequestReader> ranks(calls.begin(), calls.end());
  while (!ranks.front().at_end()) {
    std::size_t count = ranks.front().left();
    for (const RequestReader& rank : ranks) count = std::min(count, rank.left());
    for (const RequestReader& rank : ranks) rank.begin();
    sum_sparse(ranks, count);
    run(ranks, prepare(ranks, count), share);
    for (RequestReader& rank : ranks) rank.advance(count);
  }
}

}  // namespace pycollect::dist
