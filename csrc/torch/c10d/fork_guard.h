// Detects that this process was forked after an object was made. A forked child has copies of its
// parent's locks and none of its threads, so it must not use either.
#pragma once
#include <cstdint>

namespace pycollect::dist {

class ForkGuard {
 public:
  ForkGuard();
  bool none() const;  // true if this process was not forked since construction
  void require_none(const char* operation) const;

 private:
  const uint64_t before_;
};

}  // namespace pycollect::dist
