// GPU memory that processes share through a file descriptor (cuMemCreate and
// cuMemExportToShareableHandle, not cudaIpcGetMemHandle), as torch's symmetric memory does: each
// process maps the same physical memory for its own device. The memory is freed when no process has
// it mapped and no descriptor of it is open.
#pragma once
#include "../../cuda/api.h"

namespace pycollect {

// Implement allocate, export_memory, map and unmap of cuda::Api, whose set_device makes the context
// current that they need. unmap_shareable() does not wait for work that uses the memory.
std::byte* allocate_shareable(cuda::Device device, std::size_t bytes);
cuda::ExportedMemory export_shareable(std::byte* memory);
std::byte* map_shareable(cuda::Device device, const ipc::UniqueFd& memory, std::size_t bytes);
void unmap_shareable(std::byte* memory);

}  // namespace pycollect
