// A collective of one rank, checked and bound to memory: the requests that the executor runs now or
// later, and everything that must stay alive until they have run.
#pragma once
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../transport/executor.h"
#include "../arguments.h"
#include "ranges.h"
#include "staging/transport_selector.h"

namespace pycollect::dist {

// Coalesced calls and their requests. The pointers are valid until the first call has run.
struct CoalescedAgreement {
  struct BoundRequest {
    const shm::Request* request;
    shm::Transport* transport;  // null: the host transport
  };
  std::vector<BoundRequest> requests = {};
  std::vector<std::shared_ptr<TensorStaging>> stagings = {};
  bool agreed = false;
  std::exception_ptr error = {};  // set if the agreement failed; every call of the list rethrows it
};

struct Call {
  Collective collective;
  const char* name;                 // operation name in the public API
  uint64_t number = 0;              // sequence number of the group's calls in torch's count
  std::string_view algorithm = {};  // from the group's options; empty: the selector chooses
  GroupDevices* devices = nullptr;  // the group's devices
  std::chrono::milliseconds timeout{};
  std::vector<shm::Request> requests = {};            // run in this order, one per dtype
  std::shared_ptr<CoalescedAgreement> together = {};  // null: the call is not coalesced
  std::string refusal = {};  // if not empty, published to the peers; the call does not run
  Tensors held = {};         // tensors that the requests' addresses point into
  std::vector<std::function<void()>> fills = {};  // run first: compute temporary inputs
  std::vector<std::pair<at::Tensor, at::Tensor>> copies = {};  // done after the requests: dst, src
  std::shared_ptr<TensorStaging> staging = {};  // staging of device tensors; null: host tensors
  // Memory that the calls of the same list write so far. Set only while a coalesced call is bound.
  Ranges* written = nullptr;
  // Stream positions at the request, set if a device tensor overlaps `written`. The call's tensors
  // are then copied out in its turn, after the earlier calls have written them.
  std::vector<std::shared_ptr<DeviceEvent>> asked = {};
  // Callback that runs last, before the group's next call begins.
  std::function<void(const shm::OpContext&)> then = {};
  Tensors results = {};  // the value of the call's future
};

}  // namespace pycollect::dist
