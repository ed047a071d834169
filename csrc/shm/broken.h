// The state of a group that has failed: found by one rank, said once in the shared memory, and
// thrown with the same words by all.
#pragma once
#include <string>

#include "layout.h"
#include "wait.h"

namespace pycollect::shm {

class Broken {
 public:
  Broken(Breakage& breakage, std::string group) : breakage_(breakage), group_(std::move(group)) {}

  bool yes() const { return breakage_.state.load(std::memory_order_acquire) != Breakage::whole; }
  // Breaks the group for `cause` (Breakage::lost or timed_out), unless it is broken already.
  void say(uint32_t kind, const std::string& cause, const Occasion* found_in);
  // Throws what it is broken for: PeerLost or Timeout.
  [[noreturn]] void rethrow(const Occasion& occasion) const;
  [[noreturn]] void rethrow() const;                 // while the group is made
  std::string name(const Occasion& occasion) const;  // "all_reduce #17 of group 'default'"

 private:
  uint32_t hear() const;
  [[noreturn]] void fail(uint32_t kind, const std::string& where, const std::string& since) const;

  Breakage& breakage_;
  const std::string group_;
};

}  // namespace pycollect::shm
