// Where another process of this host can hand a descriptor in to this one: a datagram socket
// without a file, so nobody waits for anybody, and it is gone with its owner.
#pragma once
#include <optional>
#include <string>

#include "system.h"

namespace pycollect::shm {

class Hatch {
 public:
  Hatch();
  const std::string& address() const { return address_; }
  // Puts aside what has come with this token, and throws away all else: strangers can fill the
  // queue, and then nobody can hand in anything.
  void sort(uint64_t token);
  // The descriptor that came with this token; throws std::runtime_error when none has come.
  Descriptor take(uint64_t token);

 private:
  std::string address_;
  Descriptor socket_;
  std::optional<Descriptor> found_;
};

// Waits a while for room in a full queue; throws std::runtime_error.
void hand_in(const std::string& address, int fd, uint64_t token);

}  // namespace pycollect::shm
