// CUDA as slabs ask for it.
#pragma once
#include <memory>
#include <string>

#include "../../slabs/gpu.h"

namespace pycollect::dist {

// `ipc` is how memory goes to other processes: see slabs::Exports.
std::shared_ptr<slabs::Gpu> ipc_gpu(const std::string& ipc);

}  // namespace pycollect::dist
