// send and recv of one rank of a group.
#pragma once
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "call.h"

namespace pycollect::dist {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A message of at most this many bytes is eager: its data goes before its receive is known.
inline constexpr std::size_t kEagerBytes = 16 << 10;

struct P2POp {
  at::Tensor tensor;
  std::optional<Rank> peer;  // none: receive from any rank
  int tag;
  std::chrono::milliseconds timeout;
};

class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  virtual WorkPtr send(const P2POp& op) = 0;
  virtual WorkPtr receive(const P2POp& op) = 0;
  // Throws if send() or receive() would, before data moves. Returns whether the tensor is on a
  // device.
  virtual bool check(const P2POp& op, const char* name, bool receives) const = 0;
};

// Begins the event of a message.
inline std::shared_ptr<ProfilerEvent> begin_event(const P2POp& op, bool receives) {
  const char* const name = !receives ? "send" : op.peer ? "recv" : "recvAnySource";
  return ProfilerEvent::begin(name, op.tensor);
}

// Checks a message of a group of `world` ranks, as PointToPoint::check does.
bool check_message(const P2POp& op, const char* name, bool receives, int world, DeviceOps& devices);

}  // namespace pycollect::dist
