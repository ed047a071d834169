// See point_to_point.h.
#include "point_to_point.h"

#include "../../plan/error.h"
#include "binder.h"

namespace pycollect::dist {

bool PointToPoint::check(const P2POp& op) const {
  fork_guard_.require_not_forked(op.name());
  if (op.peer) check_rank(*op.peer, world_, op.name(), op.receives ? "src" : "dst");
  require(op.tag >= 0, op.name(), ": tag is ", op.tag, "; it must not be negative");
  const ArgumentName label{op.name(), "tensor"};
  const bool on_device = check_operand(
      op.tensor, op.receives ? AccessMode::write : AccessMode::read, label, *devices_);
  dtype_number(op.tensor, label);
  return on_device;
}

MessageWork::MessageWork(const P2POp& op, uint64_t number, Rank rank,
                         std::shared_ptr<TensorStaging> staging, std::weak_ptr<WorkOwner> owner,
                         std::shared_ptr<WorkOwner> kept)
    : op(op),
      rank(rank),
      data(op.tensor),
      event(ProfilerEvent::begin(op.receives && !op.peer ? "recvAnySource" : op.name(), op.tensor)),
      number_(number),
      staging_(std::move(staging)),
      owner_(std::move(owner)),
      kept_(std::move(kept)) {}

int MessageWork::sourceRank() const {
  const Rank known = source;
  return known >= 0 ? known : op.peer.value_or(-1);
}

ipc::Envelope MessageWork::envelope() const {
  return {static_cast<uint64_t>(op.tensor.nbytes()), dtype_number(op.tensor, {op.name(), "tensor"}),
          static_cast<uint32_t>(op.tag)};
}

std::string MessageWork::describe(const std::string& of_group) const {
  const Rank peer = sourceRank();
  return text(name(), " #", number_, op.receives ? " from " : " to ",
              peer >= 0 ? text("rank ", peer) : "any rank", of_group, " with tag ", op.tag, " on ",
              op.tensor.sizes(), " ", dtype_name(op.tensor));
}

}  // namespace pycollect::dist
