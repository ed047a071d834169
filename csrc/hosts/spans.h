// Slices of call buffers, whose elements may lie in several tensors.
#pragma once
#include <cstring>
#include <vector>

#include "../rank_executor/request.h"

namespace pycollect::ipc {

inline std::size_t ceil_div(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

// Returns the options of a fold of all ranks' values, of which a part may be added up elsewhere.
inline FoldOptions of_world(FoldOptions options, int world) {
  options.world = world;
  return options;
}

using Spans = std::vector<BufferSpan>;

inline std::size_t elements(const Spans& spans) {
  std::size_t all = 0;
  for (const BufferSpan& s : spans) all += s.count;
  return all;
}

inline void append(Spans& to, const Spans& more) { to.insert(to.end(), more.begin(), more.end()); }

// Returns `count` elements of `item` bytes from element `begin` on.
inline Spans slice(const CallBuffer& buffer, std::size_t begin, std::size_t count,
                   std::size_t item) {
  Spans found;
  for (const BufferSpan& s : buffer.spans) {
    if (count == 0) break;
    if (begin >= s.count) {
      begin -= s.count;
      continue;
    }
    const std::size_t n = std::min(count, s.count - begin);
    found.push_back({s.base + begin * item, n});
    begin = 0;
    count -= n;
  }
  return found;
}

// Returns where block `r` of a buffer with several blocks begins.
inline std::size_t begin_of(const CallBuffer& buffer, Rank r) {
  return std::reduce(buffer.blocks.begin(), buffer.blocks.begin() + r);
}
inline Spans block(const CallBuffer& buffer, Rank r, std::size_t item) {
  return slice(buffer, begin_of(buffer, r), buffer.blocks[r], item);
}
inline Spans whole(const CallBuffer& buffer, std::size_t item) {
  return slice(buffer, 0, total(buffer), item);
}

// Copies as many elements as `from` has.
inline void copy(const Spans& to, const Spans& from, std::size_t item) {
  auto into = to.begin();
  std::size_t at = 0;
  for (const BufferSpan& s : from)
    for (std::size_t done = 0; done < s.count;) {
      const std::size_t n = std::min(s.count - done, into->count - at);
      std::memmove(into->base + at * item, s.base + done * item, n * item);
      done += n;
      at += n;
      if (at == into->count) ++into, at = 0;
    }
}

}  // namespace pycollect::ipc
