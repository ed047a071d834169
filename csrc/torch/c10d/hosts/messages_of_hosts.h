// send and recv of a group over several hosts: through shared memory within a host, else through
// the wire.
#pragma once
#include "remote_messages.h"

namespace pycollect::dist {

// `local`: within this host. `me`: rank in the world.
std::shared_ptr<PointToPoint> messages_of_hosts(std::shared_ptr<PointToPoint> local,
                                                std::shared_ptr<RemoteMessages> remote,
                                                const Hosts& hosts, Rank me,
                                                std::shared_ptr<DeviceOps> devices);

}  // namespace pycollect::dist
