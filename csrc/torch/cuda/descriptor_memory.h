// GPU memory that goes to other processes as a file descriptor: physical memory, mapped by each
// process for its own device, as torch's symmetric memory does. It is gone when nobody has it
// mapped and no descriptor of it is left, so each of those ends as soon as it has served.
#pragma once
#include <map>
#include <memory>
#include <mutex>

#include "../../slabs/gpu.h"

namespace pycollect::dist {

// From any thread.
class DescriptorMemory {
 public:
  DescriptorMemory();
  ~DescriptorMemory();

  std::byte* allocate(slabs::Device device, std::size_t bytes);
  void release(slabs::Device device, std::byte* memory);
  shm::Descriptor descriptor_of(slabs::Device device, std::byte* memory);
  std::size_t bytes_of(std::byte* memory);  // whole pages
  std::byte* map(slabs::Device device, const shm::Descriptor& memory, std::size_t bytes);
  void unmap(slabs::Device device, std::byte* opened);

 private:
  class Claim;
  class Mapping;
  struct Own {
    std::unique_ptr<Claim> claim;
    std::unique_ptr<Mapping> mapping;  // ends before the claim does
  };

  std::mutex mutex_;
  std::map<std::byte*, Own> own_;
  std::map<std::byte*, std::unique_ptr<Mapping>> mapped_;
};

}  // namespace pycollect::dist
