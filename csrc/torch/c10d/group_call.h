// A collective of one rank, checked and bound to memory: the requests that the executor runs now or
// later, and everything that must stay alive until they have run.
#pragma once
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../rank_executor/request.h"
#include "../arguments.h"
#include "../profiler.h"
#include "staging.h"

namespace pycollect::dist {

// A set of memory ranges in which overlapping and adjacent ranges are merged. Adding or looking up
// a range costs one search in an ordered map.
class AddressRanges {
 public:
  void add(const std::byte* begin, const std::byte* end) {
    if (begin == end) return;
    auto next = ends_.upper_bound(begin);
    if (next != ends_.begin() && std::prev(next)->second >= begin) begin = (--next)->first;
    while (next != ends_.end() && next->first <= end) {
      end = std::max(end, next->second);
      next = ends_.erase(next);
    }
    ends_.emplace(begin, end);
  }

  // Returns whether any byte of [begin, end) is in the set.
  bool touch(const std::byte* begin, const std::byte* end) const {
    const auto behind = ends_.lower_bound(end);
    return begin != end && behind != ends_.begin() && std::prev(behind)->second > begin;
  }

 private:
  std::map<const std::byte*, const std::byte*> ends_;  // begin -> end
};

// All requests of coalesced calls, on which the ranks agree before the first call runs. The
// pointers are valid until then.
struct CoalescedRequests {
  std::vector<const ipc::CollectiveRequest*> requests = {};
  std::vector<std::shared_ptr<TensorStaging>> stagings = {};
  bool agreed = false;
  std::exception_ptr error = {};  // set if the agreement failed; every call of the list rethrows it
};

class RankCommunicator;
class SparseSums;

struct GroupCall {
  Collective collective;
  const char* name;                 // operation name in the public API
  uint64_t number = 0;              // sequence number of the call, as torch counts them
  ipc::Deadline queued = {};        // when it was queued
  uint64_t scope = 0;               // which callbacks have made the call (ProcessQueue); 0: none
  std::string_view algorithm = {};  // from the group's options; empty: the selector chooses
  FoldOrder order = FoldOrder::rank;
  RankCommunicator* communicator = nullptr;
  std::chrono::milliseconds timeout{};
  c10::SmallVector<ipc::CollectiveRequest, 1> requests = {};  // run in this order, one per dtype
  struct {  // to which the requests' buffers refer
    c10::SmallVector<ipc::BufferSpan, 1> spans = {};
    c10::SmallVector<std::size_t, 1> blocks = {};
  } memory = {};
  std::shared_ptr<CoalescedRequests> coalesced = {};  // null: the call is not coalesced
  std::string refusal = {};  // if not empty, published to the peers; the call does not run
  c10::SmallVector<at::Tensor, 2> held = {};      // into which the requests' addresses point
  std::vector<std::function<void()>> fills = {};  // run first: compute temporary inputs
  std::vector<std::pair<at::Tensor, at::Tensor>> copies = {};  // done after the requests: dst, src
  std::shared_ptr<TensorStaging> staging = {};  // staging of device tensors; null: host tensors
  // Memory that the earlier calls of the same list write. Set only while a coalesced call is bound.
  AddressRanges* written = nullptr;
  // Events on the caller's streams at the time of the call, one per device, set if a device tensor
  // overlaps `written`. The tensors are then copied into staging when the call runs, after the
  // earlier calls have written them.
  std::vector<std::shared_ptr<DeviceEvent>> requested_at = {};
  // Set if the first request is of sparse tensors.
  std::shared_ptr<SparseSums> sparse = {};
  std::shared_ptr<ProfilerEvent> event = {};     // ends when the call has run; null: no profiler
  c10::SmallVector<at::Tensor, 1> results = {};  // the value of the call's future
};

}  // namespace pycollect::dist
