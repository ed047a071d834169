#include "host_copy.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace pycollect {
namespace {

// A core copies this in some 10 us, several times what it takes to wake one.
constexpr int64_t kGrainBytes = 128 * 1024;

void copy_line(std::byte* dst, const std::byte* src, int64_t bytes) {
  threads()(bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(dst + begin, src + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace

// Long lines are shared out by bytes, many short ones by lines.
void copy_on_host(const cuda::CopyRect& r) {
  const auto bytes = static_cast<int64_t>(r.bytes), rows = static_cast<int64_t>(r.rows);
  if (rows == 1 || bytes >= kGrainBytes) {
    for (int64_t row = 0; row < rows; ++row)
      copy_line(r.dst + row * r.dst_pitch, r.src + row * r.src_pitch, bytes);
    return;
  }
  const int64_t grain = std::max<int64_t>(kGrainBytes / std::max<int64_t>(bytes, 1), 1);
  threads()(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(r.dst + row * r.dst_pitch, r.src + row * r.src_pitch, r.bytes);
  });
}

}  // namespace pycollect
