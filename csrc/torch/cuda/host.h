// The host as the executor for devices asks for it.
#pragma once
#include "../../cuda/ring.h"

namespace pycollect {

cuda::Host& torch_host();

}  // namespace pycollect
