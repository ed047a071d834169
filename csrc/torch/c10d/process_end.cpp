// See process_end.h.
#include "process_end.h"

#include <unistd.h>

#include <atomic>

namespace pycollect::dist {
namespace {

std::atomic<bool> ending{false};
thread_local bool exempt = false;

}  // namespace

void begin_process_end() {
  exempt = true;
  ending = true;
}

void exempt_from_process_end() { exempt = true; }

StaysAtProcessEnd::~StaysAtProcessEnd() {
  while (ending && !exempt) pause();
}

}  // namespace pycollect::dist
