// Pinned memory of torch's, kept for ever, and copies by torch's threads.
#include "host.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <cstring>

#include "../gpus.h"
#include "../threads.h"

namespace pycollect {
namespace {

// Of a piece this size a core copies some 10 us long, several times what it takes to wake one.
constexpr std::size_t kGrainBytes = 128 * 1024;

class TorchHost final : public cuda::Host {
 public:
  std::byte* new_pinned(std::size_t bytes) override {
    const at::Device current(at::kCUDA, c10::cuda::current_device());
    const auto size = static_cast<int64_t>(bytes);
    const at::Tensor& kept = *new at::Tensor(new_pinned_bytes(size, current));
    return static_cast<std::byte*>(kept.mutable_data_ptr());
  }

  // Long lines are shared out by bytes, many short ones by lines.
  void copy(const cuda::Rectangle& r) override {
    const auto bytes = static_cast<int64_t>(r.bytes), rows = static_cast<int64_t>(r.rows);
    if (rows == 1 || r.bytes >= kGrainBytes) {
      for (int64_t row = 0; row < rows; ++row)
        threads()(bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
          std::memcpy(r.dst + row * r.dst_pitch + begin, r.src + row * r.src_pitch + begin,
                      static_cast<std::size_t>(end - begin));
        });
      return;
    }
    threads()(rows, std::max<int64_t>(kGrainBytes / r.bytes, 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        std::memcpy(r.dst + row * r.dst_pitch, r.src + row * r.src_pitch, r.bytes);
    });
  }
};

}  // namespace

cuda::Host& torch_host() {
  static TorchHost host;
  return host;
}

}  // namespace pycollect
