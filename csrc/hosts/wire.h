// The wire: moves bytes between ranks on different hosts. Every call of one rank is made by one
// thread at a time. Implemented over a process group of torch (csrc/torch/c10d/hosts).
#pragma once
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>

#include "../group/segment.h"
#include "../group/wait.h"
#include "../plan/plan.h"

namespace pycollect::ipc {

struct WireFailure : std::runtime_error {
  WireFailure(const std::string& what, bool timed_out_)
      : std::runtime_error(what), timed_out(timed_out_) {}
  bool timed_out;
};

// All methods throw WireFailure.
class Wire {
 public:
  // Numbers below this one are for collectives, the others for messages.
  static constexpr int kFirstOfMessages = 1 << 30;

  virtual ~Wire() = default;
  // Begin to send and to receive. The memory must stay valid until the transfer is awaited, or as
  // long as `owner` keeps it: after a failure the wire keeps owners until it is destroyed. The n-th
  // send with a number to a rank arrives at that rank's n-th receive with the number from this one.
  // `bytes` of a receive is a limit: the message may be shorter.
  virtual void send(Rank to, int number, const std::byte* at, std::size_t bytes, Deadline deadline,
                    MemoryOwner owner = {}) = 0;
  virtual void receive(Rank from, int number, std::byte* at, std::size_t bytes, Deadline deadline,
                       MemoryOwner owner = {}) = 0;
  // Waits for the oldest receive from the rank with this number.
  virtual void await_receive(Rank from, int number, Deadline deadline) = 0;
  // Waits until the memory of all but the last `most_left` sends may be changed.
  virtual void await_sends(Deadline deadline, std::size_t most_left = 0) = 0;
  virtual std::optional<Rank> oldest_send() const = 0;  // its peer; none: all have ended
};

}  // namespace pycollect::ipc
