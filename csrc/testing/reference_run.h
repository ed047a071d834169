// Reference execution of launches and copies on the host, on real bytes.
#pragma once
#include "../cuda/api.h"

namespace pycollect::cuda {

void fold(const KernelWork& work, const Launch& how);
void move(const CopyRect& it);

}  // namespace pycollect::cuda
