// Whether this process is still the one that something was made in. A forked child has copies of
// its parent's locks and none of its threads: it must touch neither.
#pragma once
#include <cstdint>

namespace pycollect::dist {

class Forks {
 public:
  Forks();
  bool none() const;  // since it was made
  void require_none(const char* operation) const;

 private:
  const uint64_t before_;
};

}  // namespace pycollect::dist
