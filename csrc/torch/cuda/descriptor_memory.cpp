// See descriptor_memory.h.
#include "descriptor_memory.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>

#include <cerrno>

#include "../../cuda/check.h"
#include "beside.h"
#include "driver.h"

namespace pycollect::dist {
namespace {

using shm::Descriptor;
using slabs::Device;
using Physical = CUmemGenericAllocationHandle;

CUmemAllocationProp properties_of(Device device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
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

}  // namespace

// This process's claim to some physical memory.
class DescriptorMemory::Claim {
 public:
  Claim(Device device, std::size_t bytes) {
    const CUmemAllocationProp properties = properties_of(device);
    call_driver<decltype(&cuMemCreate)>("cuMemCreate", &physical_, bytes, &properties, 0);
  }
  explicit Claim(const Descriptor& descriptor) {
    void* const number = reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor.get()));
    call_driver<decltype(&cuMemImportFromShareableHandle)>(
        "cuMemImportFromShareableHandle", &physical_, number,
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
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
  Descriptor descriptor() const {
    int fd = -1;
    call_driver<decltype(&cuMemExportToShareableHandle)>(
        "cuMemExportToShareableHandle", &fd, physical_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        0);
    Descriptor made(fd);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) shm::refuse("cannot keep a descriptor", errno);
    return made;
  }

 private:
  Physical physical_ = 0;
};

// Addresses, and what is mapped there for one device.
class DescriptorMemory::Mapping {
 public:
  explicit Mapping(std::size_t bytes) : bytes_(bytes) {
    call_driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve", &at_, bytes, 0, 0, 0);
  }
  ~Mapping() {
    try {
      end();
    } catch (...) {  // as above
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void begin(Device device, const Claim& claim) {
    call_driver<decltype(&cuMemMap)>("cuMemMap", at_, bytes_, 0, claim.get(), 0);
    mapped_ = true;
    CUmemAccessDesc access = {};
    access.location = properties_of(device).location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    call_driver<decltype(&cuMemSetAccess)>("cuMemSetAccess", at_, bytes_, &access, 1);
  }
  void end() {
    if (std::exchange(mapped_, false))
      call_driver<decltype(&cuMemUnmap)>("cuMemUnmap", at_, bytes_);
    if (const CUdeviceptr at = std::exchange(at_, 0); at != 0)
      call_driver<decltype(&cuMemAddressFree)>("cuMemAddressFree", at, bytes_);
  }
  std::byte* base() const { return reinterpret_cast<std::byte*>(at_); }
  std::size_t bytes() const { return bytes_; }

 private:
  const std::size_t bytes_;
  CUdeviceptr at_ = 0;
  bool mapped_ = false;
};

DescriptorMemory::DescriptorMemory() = default;

// What is still here has been given up: others may have it open, or streams be stuck in it.
DescriptorMemory::~DescriptorMemory() {
  if (!own_.empty() || !mapped_.empty())
    static_cast<void>(new auto(std::make_pair(std::move(own_), std::move(mapped_))));
}

std::byte* DescriptorMemory::allocate(Device device, std::size_t bytes) {
  const Beside beside(device_of(device));
  begin_context();
  const std::size_t page = granularity_of(properties_of(device));
  const std::size_t whole = (bytes + page - 1) / page * page;
  Own own{std::make_unique<Claim>(device, whole), std::make_unique<Mapping>(whole)};
  own.mapping->begin(device, *own.claim);
  std::byte* const base = own.mapping->base();
  const std::lock_guard lock(mutex_);
  own_[base] = std::move(own);
  return base;
}

void DescriptorMemory::release(Device device, std::byte* memory) {
  const Beside beside(device_of(device));
  const std::lock_guard lock(mutex_);
  own_.extract(memory).mapped().mapping->end();
}

shm::Descriptor DescriptorMemory::descriptor_of(Device device, std::byte* memory) {
  const Beside beside(device_of(device));
  const std::lock_guard lock(mutex_);
  return own_.at(memory).claim->descriptor();
}

std::size_t DescriptorMemory::bytes_of(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  return own_.at(memory).mapping->bytes();
}

std::byte* DescriptorMemory::map(Device device, const Descriptor& memory, std::size_t bytes) {
  const Beside beside(device_of(device));
  begin_context();
  const Claim claim(memory);  // what is mapped needs none
  auto mapping = std::make_unique<Mapping>(bytes);
  mapping->begin(device, claim);
  std::byte* const base = mapping->base();
  const std::lock_guard lock(mutex_);
  mapped_[base] = std::move(mapping);
  return base;
}

void DescriptorMemory::unmap(Device device, std::byte* opened) {
  const Beside beside(device_of(device));
  const std::lock_guard lock(mutex_);
  mapped_.extract(opened).mapped()->end();
}

}  // namespace pycollect::dist
