// A test of peer access. Drivers report peer access even where an IOMMU or PCIe access control
// (ACS) then loses the data that is written.
#pragma once
#include <string>

#include "../../cuda/api.h"

namespace pycollect {

// Writes memory of `to`, which torch allocated, with a kernel on `from`, and reads it back. Returns
// the defect as a clause without a final period, or an empty string. Waits for the current streams
// of both devices. Throws ValueError if one of them is capturing.
std::string test_peer_access(cuda::Device from, cuda::Device to);

}  // namespace pycollect
