// Reference execution of launches and copies on the host, on real bytes.
#pragma once
#include "../cuda/api.h"

namespace pycollect::cuda {

// Executes one work of a launch, a fold or a copy; only the type, op and options of `how` are used.
void fold(const LaunchWork& work, const Launch& how);
void move(const CopyRect& it);

}  // namespace pycollect::cuda
