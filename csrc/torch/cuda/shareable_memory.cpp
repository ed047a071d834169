// See shareable_memory.h.
#include "shareable_memory.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "driver.h"

namespace pycollect {
namespace {

using cuda::Device;
using ipc::UniqueFd;

constexpr auto kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

CUmemAllocationProp properties_of(Device device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kHandleType;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

std::size_t granularity_of(const CUmemAllocationProp& properties) {
  std::size_t bytes = 0;
  call_driver<decltype(&cuMemGetAllocationGranularity)>(
      "cuMemGetAllocationGranularity", &bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  return bytes;
}

CUdeviceptr address(const std::byte* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

std::size_t bytes_at(CUdeviceptr at) {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  call_driver<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange", &base, &bytes, at);
  return bytes;
}

// Owns a handle to physical memory. Mapped memory needs no handle to stay allocated.
class AllocationHandle {
 public:
  // Calls `function`, the driver's `call`, with the address of the handle and the arguments.
  template <class Function, class... Arguments>
  AllocationHandle(Function function, const char* call, Arguments... arguments) {
    check_driver(function(&handle_, arguments...), call);
  }
  ~AllocationHandle() {
    try {
      call_driver<decltype(&cuMemRelease)>("cuMemRelease", handle_);
    } catch (...) {  // the device has failed, and its memory is lost
    }
  }
  AllocationHandle(const AllocationHandle&) = delete;
  AllocationHandle& operator=(const AllocationHandle&) = delete;
  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
};

std::byte* map_handle(Device device, const AllocationHandle& handle, std::size_t bytes) {
  CUdeviceptr at = 0;
  call_driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve", &at, bytes, 0, 0, 0);
  bool is_mapped = false;
  try {
    call_driver<decltype(&cuMemMap)>("cuMemMap", at, bytes, 0, handle.get(), 0);
    is_mapped = true;
    CUmemAccessDesc access = {};
    access.location = properties_of(device).location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    call_driver<decltype(&cuMemSetAccess)>("cuMemSetAccess", at, bytes, &access, 1);
  } catch (...) {
    if (is_mapped) call_driver<decltype(&cuMemUnmap)>("cuMemUnmap", at, bytes);
    call_driver<decltype(&cuMemAddressFree)>("cuMemAddressFree", at, bytes);
    throw;
  }
  return reinterpret_cast<std::byte*>(at);
}

}  // namespace

std::byte* allocate_shareable(Device device, std::size_t bytes) {
  const CUmemAllocationProp properties = properties_of(device);
  const std::size_t page = granularity_of(properties);
  const std::size_t whole = (bytes + page - 1) / page * page;
  const AllocationHandle handle(driver_function<decltype(&cuMemCreate)>("cuMemCreate"),
                                "cuMemCreate", whole, &properties, 0);
  return map_handle(device, handle, whole);
}

cuda::ExportedMemory export_shareable(std::byte* memory) {
  constexpr const char* kName = "cuMemRetainAllocationHandle";
  const AllocationHandle handle(driver_function<decltype(&cuMemRetainAllocationHandle)>(kName),
                                kName, static_cast<void*>(memory));
  int fd = -1;
  call_driver<decltype(&cuMemExportToShareableHandle)>("cuMemExportToShareableHandle", &fd,
                                                       handle.get(), kHandleType, 0);
  UniqueFd descriptor(fd);
  if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
    ipc::refuse("cannot set FD_CLOEXEC on a descriptor of GPU memory", errno);
  return {std::move(descriptor), bytes_at(address(memory))};
}

std::byte* map_shareable(Device device, const UniqueFd& memory, std::size_t bytes) {
  constexpr const char* kName = "cuMemImportFromShareableHandle";
  void* const fd = reinterpret_cast<void*>(static_cast<uintptr_t>(memory.get()));
  const AllocationHandle handle(driver_function<decltype(&cuMemImportFromShareableHandle)>(kName),
                                kName, fd, kHandleType);
  return map_handle(device, handle, bytes);
}

void unmap_shareable(std::byte* memory) {
  const CUdeviceptr at = address(memory);
  const std::size_t bytes = bytes_at(at);
  call_driver<decltype(&cuMemUnmap)>("cuMemUnmap", at, bytes);
  call_driver<decltype(&cuMemAddressFree)>("cuMemAddressFree", at, bytes);
}

}  // namespace pycollect
