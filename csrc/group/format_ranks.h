// Formats a list of ranks for messages.
#pragma once
#include <string>
#include <vector>

#include "../plan/error.h"
#include "../plan/plan.h"

namespace pycollect::ipc {

// `name` formats ranks as "rank 3", "ranks 0, 2" or "ranks 0-3, 5"; `numbers` omits the noun.
inline std::string numbers(const std::vector<Rank>& ranks) {
  std::string all;
  for (std::size_t i = 0, end = 0; i < ranks.size(); i = end) {
    end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;  // two ranks are not a range
    all += text(all.empty() ? "" : ", ", ranks[i]);
    if (end - i > 1) all += text("-", ranks[end - 1]);
  }
  return all;
}
inline std::string name(const std::vector<Rank>& ranks) {
  return text(ranks.size() == 1 ? "rank " : "ranks ", numbers(ranks));
}

}  // namespace pycollect::ipc
