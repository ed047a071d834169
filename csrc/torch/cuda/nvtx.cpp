// Ranges that NVIDIA's tools show. NVTX is headers alone: it looks for a tool once, and returns at
// once where there is none.
#include <nvtx3/nvToolsExt.h>

#include "../profiler_range.h"

namespace pycollect {
namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t ours = nvtxDomainCreateA("pycollect");
  return ours;
}

}  // namespace

void begin_range(const char* call) {
  nvtxEventAttributes_t about = {};
  about.version = NVTX_VERSION;
  about.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  about.messageType = NVTX_MESSAGE_TYPE_ASCII;
  about.message.ascii = call;
  nvtxDomainRangePushEx(domain(), &about);
}
void end_range() { nvtxDomainRangePop(domain()); }

}  // namespace pycollect
