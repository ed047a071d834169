// Which GPUs reach each other's memory, as far as the thread that asks may know it.
#pragma once

namespace pycollect {

bool stages_all();  // does this thread pretend that no GPU reaches another?

}  // namespace pycollect
