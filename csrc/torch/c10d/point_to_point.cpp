// See point_to_point.h.
#include "point_to_point.h"

#include "../../plan/error.h"
#include "binder.h"

namespace pycollect::dist {

bool check_message(const P2POp& op, const char* name, bool receives, int world,
                   DeviceOps& devices) {
  if (op.peer) check_rank(*op.peer, world, name, receives ? "src" : "dst");
  require(op.tag >= 0, name, ": tag is ", op.tag, "; it must not be negative");
  const ArgumentName label{name, "tensor"};
  const bool on_device =
      check_operand(op.tensor, receives ? AccessMode::write : AccessMode::read, label, devices);
  dtype_number(op.tensor, label);
  return on_device;
}

}  // namespace pycollect::dist
