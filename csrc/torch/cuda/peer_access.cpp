// Peer access between CUDA devices. It is enabled through torch, because torch's allocator may map
// its memory (expandable segments) on one device only, and tested in memory of that allocator:
// drivers report peer access even where an IOMMU or PCIe access control (ACS) then loses the data
// that is written.
#include "../../cuda/peer_access.h"

#include <ATen/cuda/PeerToPeerAccess.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "../../cuda/check.h"
#include "../../cuda/device_guard.h"
#include "../../plan/error.h"
#include "../gpus.h"
#include "../log.h"
#include "api.h"

namespace pycollect {
namespace {

using c10::cuda::CUDAStream;
using cuda::Device;

// Several pages and a part of one: a wrong mapping affects whole pages of 4 or 64 KiB.
constexpr std::size_t kBytes = 256 * 1024 + 48;
// Time limit of the test of a pair of GPUs; a working pair takes microseconds.
constexpr std::chrono::seconds kTimeout(10);

std::byte* bytes_in(const at::Tensor& t) { return static_cast<std::byte*>(t.mutable_data_ptr()); }

// Writes a pattern that no failure leaves by chance: no word is repeated.
void write_pattern(const at::Tensor& t, uint32_t seed) {
  std::byte* const at = bytes_in(t);
  for (uint32_t i = 0; i < kBytes / sizeof i; ++i) {
    const uint32_t word = (i + seed) * 2654435761U;  // Knuth's odd multiplier: all words differ
    std::memcpy(at + i * sizeof word, &word, sizeof word);
  }
}

// Uses streams of torch's pool, because the program's work on the current ones may take long.
class PeerAccessTest {
 public:
  PeerAccessTest(Device from, Device to)
      : api_(cuda_api()), from_(pooled_stream(from)), to_(pooled_stream(to)) {}

  std::string run() {
    for (const CUDAStream& s : {from_, to_}) {
      const c10::cuda::CUDAGuard guard(s.device());
      const CUDAStream current = c10::cuda::getCurrentCUDAStream(s.device_index());
      require(api_.capture_id(api_stream(current)) == 0, "peer access from ", from_.device(),
              " to ", to_.device(),
              " has not been tested yet, and cannot be tested while a CUDA graph is captured; make "
              "the call once before the capture");
    }
    const c10::cuda::CUDAMultiStreamGuard guard({from_, to_});
    allocate();
    if (!finished(write_and_read_back())) {
      static_cast<void>(new auto(std::move(memory_)));  // the GPU may still write there
      return "a write to it was not done within 10 seconds";
    }
    return find_defect();
  }

 private:
  static CUDAStream pooled_stream(Device device) {
    return c10::cuda::getStreamFromPool(/*isHighPriority=*/true,
                                        static_cast<c10::DeviceIndex>(device));
  }

  enum TestBuffer { source, remote, returned, pattern, remote_copy, returned_copy, kTestBuffers };

  void allocate() {
    memory_.resize(kTestBuffers);
    memory_[source] = new_bytes_on_gpu(kBytes, from_.device());
    memory_[returned] = new_bytes_on_gpu(kBytes, from_.device());
    memory_[remote] = new_bytes_on_gpu(kBytes, to_.device());
    for (int b : {pattern, remote_copy, returned_copy})
      memory_[b] = new_pinned_bytes(kBytes, from_.device());
    write_pattern(memory_[pattern], 1);
    write_pattern(memory_[remote_copy], kBytes);  // differs, so that unwritten memory fails
    copy(from_, source, pattern);
    copy(to_, remote, remote_copy);
    copy(from_, returned, remote_copy);
    synchronize(from_);
    synchronize(to_);
  }

  // Enqueues a kernel's stores to `to`, then a kernel's loads from it, both on the stream of
  // `from`.
  c10::Event write_and_read_back() {
    const c10::cuda::CUDAGuard guard(from_.device());
    store(remote, source);
    store(returned, remote);
    c10::Event done(at::kCUDA);
    done.record(from_.unwrap());
    return done;
  }

  std::string find_defect() {
    copy(from_, returned_copy, returned);
    copy(to_, remote_copy, remote);
    synchronize(from_);
    synchronize(to_);
    const auto differs = [&](TestBuffer b) {
      return std::memcmp(bytes_in(memory_[b]), bytes_in(memory_[pattern]), kBytes) != 0;
    };
    if (differs(remote_copy)) return "data written to it did not arrive";
    if (differs(returned_copy)) return "data read from it was wrong";
    return {};
  }

  Device device_of(TestBuffer b) const {
    return memory_[b].is_cuda() ? memory_[b].device().index() : cuda::kHost;
  }
  void copy(const CUDAStream& on, TestBuffer dst, TestBuffer src) {
    const c10::cuda::CUDAGuard guard(on.device());
    const auto pitch = static_cast<std::ptrdiff_t>(kBytes);
    api_.copy(api_stream(on), {bytes_in(memory_[dst]), bytes_in(memory_[src]), pitch, pitch, kBytes,
                               1, device_of(dst), device_of(src)});
  }
  void store(TestBuffer dst, TestBuffer src) {
    cuda::Launch launch{{}, DType::u8, ReduceOp::sum, {.world = 1}};
    launch.tasks.push_back({{bytes_in(memory_[dst])}, {bytes_in(memory_[src])}, {0}, {0}, kBytes});
    api_.launch(api_stream(from_), launch);
  }
  void synchronize(const CUDAStream& s) {
    const c10::cuda::CUDAGuard guard(s.device());
    api_.synchronize(api_stream(s));
  }
  static bool finished(const c10::Event& done) {
    const auto end = std::chrono::steady_clock::now() + kTimeout;
    while (!done.query()) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

  cuda::Api& api_;
  const cuda::RelaxedCaptureMode mode_{api_};  // another thread may capture
  const CUDAStream from_, to_;
  std::vector<at::Tensor> memory_;
};

// Writes memory of `to`, which torch allocated, with a kernel on `from`, and reads it back. Returns
// the defect as a clause without a final period, or an empty string. Waits for the current streams
// of both devices. Throws ValueError if one of them is capturing.
std::string test_peer_access(Device from, Device to) { return PeerAccessTest(from, to).run(); }

}  // namespace

cuda::PeerAccessCache& peers() {
  // Never destroyed, because CUDA is used after main.
  static cuda::PeerAccessCache& peers = *new cuda::PeerAccessCache({
      .query =
          [](cuda::Device from, cuda::Device to) {
            return at::cuda::get_p2p_access(static_cast<c10::DeviceIndex>(from),
                                            static_cast<c10::DeviceIndex>(to));
          },
      .test = &test_peer_access,
      .warn = &warn,
  });
  return peers;
}

PeerReport report_peer_access(int from, int to) {
  const cuda::PeerAccess access = peers().access(from, to);
  int rank = PeerReport::kUnknownRank;
  if (access.reported && from != to)
    cuda::check(cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, from, to));
  return {access.reported, access.defect, rank};
}

}  // namespace pycollect
