// GPU memory that goes to other processes as a file descriptor: physical memory, mapped by each
// process for its own device, as torch's symmetric memory does. It is freed
// when no process maps it and no descriptor of it is open.
#pragma once
#include "../../cuda/api.h"

namespace pycollect {

// As the calls of cuda::Api of these names.
std::byte* allocate_shareable(cuda::Device device, std::size_t bytes);
cuda::Exported export_shareable(std::byte* memory);
std::byte* map_shareable(cuda::Device device, const shm::Descriptor& memory, std::size_t bytes);
void unmap_shareable(std::byte* memory);

}  // namespace pycollect
