// What launches and copies do, done by the host on real bytes.
#pragma once
#include "../cuda/api.h"

namespace pycollect::cuda {

void fold(const Row& row, const Launch& how);
void move(const Rectangle& it);

}  // namespace pycollect::cuda
