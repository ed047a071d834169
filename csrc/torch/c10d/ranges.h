// Memory, as ranges that are merged where they meet: to add one or to look one up costs as much as
// finding it among them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>

namespace pycollect::dist {

class Ranges {
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

  // Is any byte of that in them?
  bool touch(const std::byte* begin, const std::byte* end) const {
    const auto behind = ends_.lower_bound(end);
    return begin != end && behind != ends_.begin() && std::prev(behind)->second > begin;
  }

 private:
  std::map<const std::byte*, const std::byte*> ends_;  // [begin]
};

}  // namespace pycollect::dist
