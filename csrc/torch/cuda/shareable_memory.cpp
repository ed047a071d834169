// See shareable_memory.h.
#include "shareable_memory.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "../../cuda/check.h"
#include "driver.h"

namespace pycollect {
namespace {

using cuda::Device;
using shm::Descriptor;
using Physical = CUmemGenericAllocationHandle;

constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

CUmemAllocationProp properties_of(Device device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kDescriptor;
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

// The driver's calls, unlike the runtime's, begin no context of the current device.
void begin_context() { cuda::check(cudaFree(nullptr)); }

CUdeviceptr address(const std::byte* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

std::size_t bytes_at(CUdeviceptr at) {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  call_driver<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange", &base, &bytes, at);
  return bytes;
}

// This process's claim to some physical memory, which needs none where it is mapped.
class Claim {
 public:
  // `call` of the driver's makes it: (the claim, arguments...).
  template <class Function, class... Arguments>
  Claim(Function function, const char* call, Arguments... arguments) {
    check_driver(function(&physical_, arguments...), call);
  }
  ~Claim() {
    try {
      call_driver<decltype(&cuMemRelease)>("cuMemRelease", physical_);
    } catch (...) {  // the device is broken, and its memory is gone with it
    }
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  Physical get() const { return physical_; }

 private:
  Physical physical_ = 0;
};

std::byte* mapped(Device device, const Claim& claim, std::size_t bytes) {
  CUdeviceptr at = 0;
  call_driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve", &at, bytes, 0, 0, 0);
  bool is_mapped = false;
  try {
    call_driver<decltype(&cuMemMap)>("cuMemMap", at, bytes, 0, claim.get(), 0);
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
  begin_context();
  const CUmemAllocationProp properties = properties_of(device);
  const std::size_t page = granularity_of(properties);
  const std::size_t whole = (bytes + page - 1) / page * page;
  const Claim claim(driver_function<decltype(&cuMemCreate)>("cuMemCreate"), "cuMemCreate", whole,
                    &properties, 0);
  return mapped(device, claim, whole);
}

cuda::Exported export_shareable(std::byte* memory) {
  constexpr const char* kClaim = "cuMemRetainAllocationHandle";
  const Claim claim(driver_function<decltype(&cuMemRetainAllocationHandle)>(kClaim), kClaim,
                    static_cast<void*>(memory));
  int fd = -1;
  call_driver<decltype(&cuMemExportToShareableHandle)>("cuMemExportToShareableHandle", &fd,
                                                       claim.get(), kDescriptor, 0);
  Descriptor made(fd);
  if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) shm::refuse("cannot keep a descriptor", errno);
  return {std::move(made), bytes_at(address(memory))};
}

std::byte* map_shareable(Device device, const Descriptor& memory, std::size_t bytes) {
  begin_context();
  constexpr const char* kClaim = "cuMemImportFromShareableHandle";
  void* const number = reinterpret_cast<void*>(static_cast<uintptr_t>(memory.get()));
  const Claim claim(driver_function<decltype(&cuMemImportFromShareableHandle)>(kClaim), kClaim,
                    number, kDescriptor);
  return mapped(device, claim, bytes);
}

void unmap_shareable(std::byte* memory) {
  const CUdeviceptr at = address(memory);
  const std::size_t bytes = bytes_at(at);
  call_driver<decltype(&cuMemUnmap)>("cuMemUnmap", at, bytes);
  call_driver<decltype(&cuMemAddressFree)>("cuMemAddressFree", at, bytes);
}

}  // namespace pycollect
