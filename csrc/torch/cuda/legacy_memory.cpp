// Memory that goes to other processes by CUDA's own handles, the oldest way. An opened handle keeps
// the owner's allocation in use: it is closed first.
#include <cuda_runtime_api.h>

#include <cstring>

#include "../../cuda/check.h"
#include "beside.h"
#include "shared_memory.h"

namespace pycollect::dist {
namespace {

using cuda::check;
using slabs::Device;

class LegacyMemory final : public slabs::Export {
 public:
  std::byte* allocate(Device device, std::size_t bytes) override {
    const Beside beside(device_of(device));
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes));
    return static_cast<std::byte*>(memory);
  }
  void free(Device device, std::byte* memory) override {
    const Beside beside(device_of(device));
    check(cudaFree(memory));
  }
  Key key_of(Device device, std::byte* memory) override {
    const Beside beside(device_of(device));
    cudaIpcMemHandle_t given = {};
    check(cudaIpcGetMemHandle(&given, memory));
    Key key = {};
    static_assert(sizeof key == sizeof given);
    std::memcpy(key.data(), &given, sizeof given);
    return key;
  }
  std::byte* open(Device device, const Key& key) override {
    const Beside beside(device_of(device));
    cudaIpcMemHandle_t given = {};
    std::memcpy(&given, key.data(), sizeof given);
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, given, cudaIpcMemLazyEnablePeerAccess));
    return static_cast<std::byte*>(memory);
  }
  void close(Device device, std::byte* opened) override {
    const Beside beside(device_of(device));
    check(cudaIpcCloseMemHandle(opened));
  }
};

}  // namespace

std::unique_ptr<slabs::Export> legacy_memory() { return std::make_unique<LegacyMemory>(); }

}  // namespace pycollect::dist
