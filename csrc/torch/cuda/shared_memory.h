// The two ways in which CUDA gives memory to other processes; see slabs::Exports, which chooses.
#pragma once
#include <memory>

#include "../../slabs/exports.h"

namespace pycollect::dist {

// Allocations of cudaMalloc's, and CUDA's own handles of them.
std::unique_ptr<slabs::Export> legacy_memory();
// Physical memory as a file descriptor, for where the former is refused: virtual machines, WSL.
std::unique_ptr<slabs::Export> descriptor_memory();

}  // namespace pycollect::dist
