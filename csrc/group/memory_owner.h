// The owner of memory that a transfer uses: the memory stays valid as long as a copy of it exists.
#pragma once
#include <memory>

namespace pycollect::ipc {

using MemoryOwner = std::shared_ptr<const void>;

}  // namespace pycollect::ipc
