// Formats a list of ranks for messages.
#pragma once
#include <string>
#include <vector>

#include "../plan/error.h"
#include "../plan/plan.h"

namespace pycollect::ipc {

// Returns "rank 3", "ranks 0, 2" or "ranks 0-3, 5".
inline std::string name(const std::vector<Rank>& ranks) {
  std::string all = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0, end = 0; i < ranks.size(); i = end) {
    end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;  // two ranks are not a range
    all += text(i == 0 ? " " : ", ", ranks[i]);
    if (end - i > 1) all += text("-", ranks[end - 1]);
  }
  return all;
}

}  // namespace pycollect::ipc
