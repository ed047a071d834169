// Wrappers of kernel services: descriptors that close themselves, random numbers, and errors.
#pragma once
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

namespace pycollect::ipc {

class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Throws std::system_error with the message "`what`: " and the text of the errno value `error`.
[[noreturn]] void refuse(const std::string& what, int error);
uint64_t random_number();  // never 0
std::string hexadecimal(uint64_t number);

}  // namespace pycollect::ipc
