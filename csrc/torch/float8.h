// How the installed torch rounds values that 8-bit floats cannot hold.
#pragma once
#include "../plan/dtype.h"

namespace pycollect {

// Converts an overflow, infinity and NaN with torch, once in a process.
const Float8Rounding& float8_rounding();

}  // namespace pycollect
