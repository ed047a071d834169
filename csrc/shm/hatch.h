// Where another process of this host can hand a descriptor in to this one: a datagram socket
// without a file, so nobody waits for anybody, and it is gone with its owner.
#pragma once
#include <string>

#include "system.h"

namespace pycollect::shm {

class Hatch {
 public:
  Hatch();
  const std::string& address() const { return address_; }
  // The descriptor that came with this token; throws std::runtime_error when none has come.
  Descriptor take(uint64_t token);

 private:
  std::string address_;
  Descriptor socket_;
};

void hand_in(const std::string& address, int fd, uint64_t token);

}  // namespace pycollect::shm
