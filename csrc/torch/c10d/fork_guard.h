// Detects that this process was forked after an object was created. A forked child has copies of
// its parent's locks but none of its threads, so it must not use either.
#pragma once
#include <cstdint>

namespace pycollect::dist {

class ForkGuard {
 public:
  ForkGuard();
  bool forked() const;  // true in a child of the process that constructed the object
  void require_not_forked(const char* operation) const;

 private:
  const uint64_t before_;
};

}  // namespace pycollect::dist
