#include "numa_nodes.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

namespace pycollect::ipc {
NumaNodes numa_nodes(const std::string& folder) {
  namespace fs = std::filesystem;
  NumaNodes nodes;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    int number = 0;
    if (std::sscanf(entry.path().filename().c_str(), "node%d", &number) != 1) continue;
    CoreSet cores;
    std::ifstream ranges(entry.path() / "cpulist");  // such as "0-15,32-47"
    for (int first = 0; ranges >> first; ranges.ignore(1, ',')) {
      int last = first;
      if (ranges.peek() == '-') ranges.ignore(), ranges >> last;
      for (int core = std::max(first, 0); core <= std::min<int>(last, cores.size() - 1); ++core)
        cores.set(core);
    }
    if (cores.any()) nodes[number] = cores;  // others have memory only
  }
  return nodes;
}

int core_share(const NumaNodes& nodes, const std::vector<CoreSet>& cores, Rank rank) {
  double share = 0;
  for (const auto& [number, node] : nodes) {
    if ((node & cores[rank]).none()) continue;
    const auto here = std::ranges::count_if(
        cores, [&node = node](const CoreSet& of) { return (node & of).any(); });
    share += static_cast<double>(node.count()) / static_cast<double>(here);
  }
  // Sums of thirds and the like may end just below a whole number.
  return share > 0 ? std::max(1, static_cast<int>(share + 1e-6)) : 0;
}

}  // namespace pycollect::ipc
