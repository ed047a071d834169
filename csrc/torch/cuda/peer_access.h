// The peer access of this process's CUDA devices.
#pragma once
#include "../../cuda/peer_access.h"

namespace pycollect {

cuda::PeerAccessCache& peers();

}  // namespace pycollect
