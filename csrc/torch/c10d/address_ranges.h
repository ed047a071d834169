// A set of memory ranges in which overlapping and adjacent ranges are merged. Adding or looking up
// a range costs one search in an ordered map.
#pragma once
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>

namespace pycollect::dist {

class AddressRanges {
 public:
  void add(const std::byte* begin, const std::byte* end) {
    if (begin == end) return;
    auto next = ends_.upper_bound(begin);
    if (next != ends_.begin() && std::prev(next)->second >= begin) begin = (--next)->first;
    while (next != ends_.end() && next->first <= end) {
      end = std::max(end, next->second);
      next = ends_.erase(next);
    }
    ends_.emplace(begin, end);
  }

  // Returns whether any byte of [begin, end) is in the set.
  bool touch(const std::byte* begin, const std::byte* end) const {
    const auto behind = ends_.lower_bound(end);
    return begin != end && behind != ends_.begin() && std::prev(behind)->second > begin;
  }

 private:
  std::map<const std::byte*, const std::byte*> ends_;  // begin -> end
};

}  // namespace pycollect::dist
