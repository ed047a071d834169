// Copies rectangles from host memory to host memory with torch's threads.
#pragma once
#include "../cuda/api.h"

namespace pycollect {

void copy_on_host(const cuda::CopyRect& rectangle);  // returns when the copy is done

}  // namespace pycollect
