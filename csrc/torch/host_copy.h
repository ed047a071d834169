// Copies of rectangles from host memory to host memory by torch's threads.
#pragma once
#include "../cuda/api.h"

namespace pycollect {

void copy_on_host(const cuda::CopyRect& rectangle);  // done when it returns

}  // namespace pycollect
