#include "system.h"

#include <sys/random.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "../plan/error.h"

namespace pycollect::ipc {

void refuse(const std::string& what, int error) {
  throw std::system_error(error, std::generic_category(), what);
}

uint64_t random_number() {
  uint64_t number = 0;
  while (number == 0)
    if (getrandom(&number, sizeof number, 0) != sizeof number && errno != EINTR)
      refuse("getrandom", errno);
  return number;
}

std::string hexadecimal(uint64_t number) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string digits;
  for (int shift = 60; shift >= 0; shift -= 4) digits += kDigits[number >> shift & 15];
  return digits;
}

}  // namespace pycollect::ipc
