// Wrappers of kernel services: descriptors that close themselves, random numbers, and errors.
#pragma once
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

namespace pycollect::shm {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Throws std::system_error: "`what`: No space left on device".
[[noreturn]] void refuse(const std::string& what, int error);
uint64_t random_number();  // never 0
std::string hexadecimal(uint64_t number);

// Fork guard: distinguishes the process that made the object from its forked children. getpid took
// 150 ns, nearly as long as a small all_reduce; reading a page that is wiped on fork takes 1 ns.
class OwnerProcess {
 public:
  OwnerProcess();
  ~OwnerProcess();
  OwnerProcess(const OwnerProcess&) = delete;
  OwnerProcess& operator=(const OwnerProcess&) = delete;
  bool is_here() const { return page_ != nullptr ? *page_ != 0 : getpid() == pid_; }

 private:
  pid_t pid_;
  unsigned char* page_ = nullptr;  // nullptr if the kernel cannot wipe a page on fork
};

}  // namespace pycollect::shm
