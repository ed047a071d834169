#include "tensor_grid.h"

#include <algorithm>

namespace pycollect {

std::vector<DtypeGroup> dtype_groups(const char* call, const TensorGrid& grid, DtypeOf dtype_of) {
  std::vector<DtypeGroup> groups;
  for (std::size_t i = 0; i < grid.width(); ++i) {
    const at::Tensor& t = grid.flat[i * grid.world];
    const DType dtype = dtype_of(t, grid.label(call, i, 0));
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const DtypeGroup& g) { return g.dtype == dtype; });
    if (group == groups.end()) group = groups.insert(groups.end(), {dtype});
    group->bytes += t.nbytes();
    group->indices.push_back(i);
  }
  return groups;
}

}  // namespace pycollect
