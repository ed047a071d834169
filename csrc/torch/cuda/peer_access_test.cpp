#include "peer_access_test.h"

#include <c10/core/Event.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "../../plan/error.h"
#include "../gpus.h"
#include "api.h"
#include "host.h"

namespace pycollect {
namespace {

using c10::cuda::CUDAStream;
using cuda::Device;

// Some pages, and a page begun: what is mapped wrongly is wrong for whole pages of 4 or 64 KiB.
constexpr std::size_t kBytes = 256 * 1024 + 48;
// Time limit of the test of a pair of GPUs; a working pair takes microseconds.
constexpr std::chrono::seconds kLongest(10);

std::byte* bytes_in(const at::Tensor& t) { return static_cast<std::byte*>(t.mutable_data_ptr()); }

// Bytes that no failure leaves by chance: neither zeros nor ones, and nowhere the same word.
void write_pattern(const at::Tensor& t, uint32_t seed) {
  std::byte* const at = bytes_in(t);
  for (uint32_t i = 0; i < kBytes / sizeof i; ++i) {
    const uint32_t word = (i + seed) * 2654435761U;  // Knuth's odd multiplier: all words differ
    std::memcpy(at + i * sizeof word, &word, sizeof word);
  }
}

class PeerAccessTest {
 public:
  PeerAccessTest(Device from, Device to)
      : api_(cuda_api()),
        from_(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(from))),
        to_(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(to))) {}

  std::string run() {
    for (const CUDAStream& s : {from_, to_}) {
      const c10::cuda::CUDAGuard guard(s.device());
      require(!api_.is_capturing(plain(s)), "whether ", from_.device(), " reaches ", to_.device(),
              " has not been tried yet, and cannot be while a CUDA graph is captured; make the "
              "call once before the capture");
    }
    allocate();
    if (!finished(exchange())) {
      static_cast<void>(new auto(std::move(memory_)));  // the GPU may still write there
      return "a write to it did not end within 10 seconds";
    }
    return verdict();
  }

 private:
  enum TestBuffer { sent, there, back, pattern, got_there, got_back, kBlocks };

  void allocate() {
    memory_.resize(kBlocks);
    memory_[sent] = new_bytes_on_gpu(kBytes, from_.device());
    memory_[back] = new_bytes_on_gpu(kBytes, from_.device());
    memory_[there] = new_bytes_on_gpu(kBytes, to_.device());
    for (int b : {pattern, got_there, got_back})
      memory_[b] = new_pinned_bytes(kBytes, from_.device());
    write_pattern(memory_[pattern], 1);
    write_pattern(memory_[got_there], kBytes);  // so that what was there before is no answer
    move(from_, sent, pattern);
    move(to_, there, got_there);
    move(from_, back, got_there);
    synchronize(from_);
    synchronize(to_);
  }

  // On the stream of `from` all of it: a kernel's stores, then its loads.
  c10::Event exchange() {
    const c10::cuda::CUDAGuard guard(from_.device());
    store(there, sent);
    store(back, there);
    c10::Event done(at::kCUDA);
    done.record(from_.unwrap());
    return done;
  }

  std::string verdict() {
    move(from_, got_back, back);
    move(to_, got_there, there);
    synchronize(from_);
    synchronize(to_);
    const auto differs = [&](TestBuffer b) {
      return std::memcmp(bytes_in(memory_[b]), bytes_in(memory_[pattern]), kBytes) != 0;
    };
    if (differs(got_there)) return "what was written there did not arrive";
    if (differs(got_back)) return "what was read there is not what it holds";
    return {};
  }

  Device device_of(TestBuffer b) const {
    return memory_[b].is_cuda() ? memory_[b].device().index() : cuda::kHost;
  }
  void move(const CUDAStream& on, TestBuffer dst, TestBuffer src) {
    const c10::cuda::CUDAGuard guard(on.device());
    const auto pitch = static_cast<std::ptrdiff_t>(kBytes);
    api_.copy(plain(on), {bytes_in(memory_[dst]), bytes_in(memory_[src]), pitch, pitch, kBytes, 1,
                          device_of(dst), device_of(src)});
  }
  void store(TestBuffer dst, TestBuffer src) {
    cuda::Launch launch{{}, DType::u8, ReduceOp::sum, {.world = 1}};
    launch.rows.push_back({{bytes_in(memory_[dst])}, {bytes_in(memory_[src])}, {0}, {0}, kBytes});
    api_.launch(plain(from_), launch);
  }
  void synchronize(const CUDAStream& s) {
    const c10::cuda::CUDAGuard guard(s.device());
    api_.synchronize(plain(s));
  }
  static bool finished(const c10::Event& done) {
    const auto end = std::chrono::steady_clock::now() + kLongest;
    while (!done.query()) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

  cuda::Api& api_;
  const CUDAStream from_, to_;
  std::vector<at::Tensor> memory_;
};

}  // namespace

std::string try_out(Device from, Device to) { return PeerAccessTest(from, to).run(); }

}  // namespace pycollect
