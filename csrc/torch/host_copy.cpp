#include "host_copy.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace pycollect {
namespace {

// A core copies this in about 10 us, several times the time it takes to wake a thread.
constexpr int64_t kGrainBytes = 128 * 1024;

void copy_row(std::byte* dst, const std::byte* src, int64_t bytes) {
  threads()(bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(dst + begin, src + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace

// Divides long rows among the threads by bytes, and many short rows by rows.
void copy_on_host(const cuda::CopyRect& r) {
  const auto bytes = static_cast<int64_t>(r.bytes), rows = static_cast<int64_t>(r.rows);
  if (rows == 1 || bytes >= kGrainBytes) {
    for (int64_t row = 0; row < rows; ++row)
      copy_row(r.dst + row * r.dst_pitch, r.src + row * r.src_pitch, bytes);
    return;
  }
  const int64_t grain = std::max<int64_t>(kGrainBytes / std::max<int64_t>(bytes, 1), 1);
  threads()(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(r.dst + row * r.dst_pitch, r.src + row * r.src_pitch, r.bytes);
  });
}

}  // namespace pycollect
