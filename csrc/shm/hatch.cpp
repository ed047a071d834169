#include "hatch.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "../plan/error.h"

namespace pycollect::shm {
namespace {

struct Address {
  sockaddr_un name = {};
  socklen_t bytes = 0;
  explicit Address(const std::string& text) {
    if (text.size() + 1 > sizeof name.sun_path) refuse("socket name", ENAMETOOLONG);
    name.sun_family = AF_UNIX;  // and a zero in front of the name: it is in no folder
    std::memcpy(name.sun_path + 1, text.data(), text.size());
    bytes = offsetof(sockaddr_un, sun_path) + 1 + text.size();
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

Descriptor make_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket) refuse("cannot make a Unix socket", errno);
  return socket;
}

// A message of one number and one descriptor.
struct Message {
  uint64_t token = 0;
  iovec data = {&token, sizeof token};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  Message() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
};

}  // namespace

Hatch::Hatch()
    : address_(text("pycollect-", hexadecimal(random_number()), hexadecimal(random_number()))),
      socket_(make_socket()) {
  const Address here(address_);
  if (bind(socket_.get(), here.get(), here.bytes) != 0) refuse("cannot bind a Unix socket", errno);
}

Descriptor Hatch::take(uint64_t token) {
  for (;;) {
    Message message;
    const ssize_t got = recvmsg(socket_.get(), &message.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse("rank 0 did not hand over the shared memory", errno);
    Descriptor carried;
    const cmsghdr* with = CMSG_FIRSTHDR(&message.header);
    if (with != nullptr && with->cmsg_level == SOL_SOCKET && with->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(with), sizeof fd);
      carried = Descriptor(fd);
    }
    if (got != sizeof token || message.token != token) continue;  // a stranger's
    if (!carried) refuse("cannot take the shared memory from rank 0", EMFILE);
    return carried;
  }
}

void hand_in(const std::string& address, int fd, uint64_t token) {
  const Descriptor socket = make_socket();
  const Address there(address);
  Message message;
  message.token = token;
  message.header.msg_name = const_cast<sockaddr*>(there.get());
  message.header.msg_namelen = there.bytes;
  cmsghdr* with = CMSG_FIRSTHDR(&message.header);
  with->cmsg_level = SOL_SOCKET;
  with->cmsg_type = SCM_RIGHTS;
  with->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(with), &fd, sizeof fd);
  while (sendmsg(socket.get(), &message.header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
    if (errno != EINTR) refuse("cannot reach its Unix socket", errno);
}

}  // namespace pycollect::shm
