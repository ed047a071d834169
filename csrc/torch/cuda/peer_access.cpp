// Peer access between CUDA devices. It is enabled through torch, because torch's allocator may map
// its memory (expandable segments) on one device only, and tested in memory of that allocator.
#include "../../cuda/peer_access.h"

#include <ATen/cuda/PeerToPeerAccess.h>
#include <cuda_runtime_api.h>

#include "../../cuda/check.h"
#include "../gpus.h"
#include "../log.h"
#include "peer_access.h"
#include "peer_access_test.h"

namespace pycollect {

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
