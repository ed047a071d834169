// How the installed torch rounds values that 8-bit floats cannot hold.
#pragma once
#include "../plan/dtype.h"

namespace pycollect {

// Returns the results of converting an overflow, infinity and NaN with torch, which is done once
// per process.
const Float8Specials& float8_specials();

}  // namespace pycollect
