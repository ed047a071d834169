// A trial of peer access, once per pair, which cannot be believed: drivers report it where an IOMMU
// or an access control service then loses what is written.
#pragma once
#include <string>

#include "../../cuda/api.h"

namespace pycollect {

// A kernel on `from` writes memory of `to` that torch allocated, and reads it back. What went
// wrong, as the end of a sentence, or nothing. Waits for both devices' current streams; throws
// ValueError while one of them is under capture.
std::string try_out(cuda::Device from, cuda::Device to);

}  // namespace pycollect
