// NVTX ranges, which NVIDIA's tools show. NVTX is header-only: it looks for a tool once, and
// without one its calls return at once.
#include <nvtx3/nvToolsExt.h>

#include "../profiler.h"

namespace pycollect {
namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("pycollect");
  return domain;
}

}  // namespace

void begin_range(const char* call) {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = call;
  nvtxDomainRangePushEx(domain(), &attributes);
}
void end_range() { nvtxDomainRangePop(domain()); }

}  // namespace pycollect
