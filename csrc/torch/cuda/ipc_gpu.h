// CUDA as slabs ask for it.
#pragma once
#include <memory>

#include "../../slabs/gpu.h"

namespace pycollect::dist {

std::shared_ptr<slabs::Gpu> ipc_gpu();

}  // namespace pycollect::dist
