#include "system.h"

#include <sys/mman.h>
#include <sys/random.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "../plan/error.h"

namespace pycollect::shm {

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

namespace {
constexpr std::size_t kPageBytes = 4096;  // the least that can be mapped; larger pages round it up
}

OwnerProcess::OwnerProcess() : pid_(getpid()) {
  void* page =
      mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, kPageBytes, MADV_WIPEONFORK) != 0) {
    munmap(page, kPageBytes);
    return;
  }
  page_ = static_cast<unsigned char*>(page);
  *page_ = 1;
}

OwnerProcess::~OwnerProcess() {
  if (page_ != nullptr) munmap(page_, kPageBytes);
}

}  // namespace pycollect::shm
