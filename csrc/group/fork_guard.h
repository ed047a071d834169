// Detects that this process was forked after an object was created. A forked child has copies of
// its parent's locks but none of its threads, so it must not use either.
#pragma once
#include <unistd.h>

namespace pycollect::ipc {

// Reads a byte that the kernel clears in forked children, which takes 1 ns. getpid() takes 150 ns,
// nearly as long as a small all_reduce.
class ForkGuard {
 public:
  ForkGuard();
  // Returns true in a child of the process that constructed the object.
  bool forked() const { return alive_ != nullptr ? *alive_ == 0 : getpid() != pid_; }
  void require_not_forked(const char* operation) const;  // throws CollectiveError

 private:
  // A pointer, not a counter of forks in a static variable: the library may be loaded twice (as
  // pycollect._testing), and one copy constructs objects that the other one uses.
  const unsigned char* alive_;  // null: no such page; then process ids are compared
  pid_t pid_;
};

}  // namespace pycollect::ipc
