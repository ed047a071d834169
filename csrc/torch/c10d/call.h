// A collective of one process that has been checked and bound to memory: what the executor runs,
// now or later, and what must live until it has.
#pragma once
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../shm/executor.h"
#include "../arguments.h"
#include "devices/ladder.h"
#include "ranges.h"

namespace pycollect::dist {

// Several calls that were coalesced: their requests, for as long as the first has not run.
struct Together {
  struct Bound {
    const shm::Request* request;
    shm::Transport* transport;  // null: the host's
  };
  std::vector<Bound> requests = {};
  std::vector<std::shared_ptr<Passage>> passages = {};
  bool agreed = false;
  std::exception_ptr error = {};  // why they did not: what all of the calls raise
};

struct Call {
  Collective collective;
  const char* name;                 // as the caller knows it
  uint64_t number = 0;              // of the group's calls, as torch counts them
  std::string_view algorithm = {};  // of the group's options; empty: the selector's
  Devices* devices = nullptr;       // of the group
  std::chrono::milliseconds timeout{};
  std::vector<shm::Request> requests = {};  // one after the other: one of each dtype
  std::shared_ptr<Together> together = {};  // none: it is alone
  std::string refusal = {};                 // why there are none: what the other ranks are told
  Tensors held = {};                        // what the requests' addresses point into
  std::vector<std::function<void()>> fills = {};  // done first: inputs that lie nowhere else
  std::vector<std::pair<at::Tensor, at::Tensor>> copies = {};  // what is left to do then: dst, src
  std::shared_ptr<Passage> passage = {};  // of tensors on devices; none: there are none
  // While it is bound: what the calls of its list write, so far; null: it is in no list.
  Ranges* written = nullptr;
  // On devices, of what touches something of that: where it was asked for. Its tensors depart when
  // its turn comes, with what the calls before it have written.
  std::vector<std::shared_ptr<Mark>> asked = {};
  // Done last, before the group's next call begins.
  std::function<void(const shm::Occasion&)> then = {};
  Tensors results = {};  // the value of the call's future
};

}  // namespace pycollect::dist
