// See messages_of_hosts.h.
#include "messages_of_hosts.h"

#include "../../../plan/error.h"
#include "../staging/device_ops.h"

namespace pycollect::dist {
namespace {

class MessagesOfHosts final : public PointToPoint {
 public:
  MessagesOfHosts(std::shared_ptr<PointToPoint> local, std::shared_ptr<RemoteMessages> remote,
                  const Hosts& hosts, Rank me, std::shared_ptr<DeviceOps> devices)
      : local_(std::move(local)),
        remote_(std::move(remote)),
        hosts_(hosts),
        me_(me),
        devices_(std::move(devices)) {}

  WorkPtr send(const P2POp& op) override {
    check(op, "send", false);
    return is_remote(op) ? remote_->send(op) : local_->send(within_host(op));
  }
  WorkPtr receive(const P2POp& op) override {
    check(op, "recv", true);
    return is_remote(op) ? remote_->receive(op) : local_->receive(within_host(op));
  }
  bool check(const P2POp& op, const char* name, bool receives) const override {
    require(op.peer.has_value(), name,
            ": a group over several hosts cannot receive from any rank; pass the source rank");
    const bool on_device = check_message(op, name, receives, hosts_.world(), *devices_);
    require(!on_device || !is_remote(op), name, ": the tensor is on ", op.tensor.device(),
            " and rank ", *op.peer, " is on another host, to which only CPU tensors can be sent; ",
            "pass .cpu()");
    return on_device;
  }

 private:
  bool is_remote(const P2POp& op) const { return hosts_.of(*op.peer) != hosts_.of(me_); }
  P2POp within_host(P2POp op) const {
    op.peer = hosts_.index(*op.peer);
    return op;
  }

  const std::shared_ptr<PointToPoint> local_;
  const std::shared_ptr<RemoteMessages> remote_;
  const Hosts& hosts_;
  const Rank me_;
  const std::shared_ptr<DeviceOps> devices_;
};

}  // namespace

std::shared_ptr<PointToPoint> messages_of_hosts(std::shared_ptr<PointToPoint> local,
                                                std::shared_ptr<RemoteMessages> remote,
                                                const Hosts& hosts, Rank me,
                                                std::shared_ptr<DeviceOps> devices) {
  return std::make_shared<MessagesOfHosts>(std::move(local), std::move(remote), hosts, me,
                                           std::move(devices));
}

}  // namespace pycollect::dist
