#include "unix_socket.h"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

namespace pycollect::shm {
namespace {

struct SocketMessage {
  uint64_t number = 0;
  iovec data = {&number, sizeof number};
  // Sized for one descriptor; padding makes room for two.
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  SocketMessage() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
  }
  SocketMessage(const SocketMessage&) = delete;
  SocketMessage& operator=(const SocketMessage&) = delete;

  void make_room() {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  void carry(int fd) {
    make_room();
    cmsghdr* with = CMSG_FIRSTHDR(&header);
    with->cmsg_level = SOL_SOCKET;
    with->cmsg_type = SCM_RIGHTS;
    with->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(with), &fd, sizeof fd);
  }
  // Returns the received descriptor. All received ones are open in this process, and those that are
  // not returned are closed.
  Descriptor carried() {
    std::vector<Descriptor> all;
    for (cmsghdr* with = CMSG_FIRSTHDR(&header); with != nullptr;
         with = CMSG_NXTHDR(&header, with)) {
      if (with->cmsg_level != SOL_SOCKET || with->cmsg_type != SCM_RIGHTS) continue;
      for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= with->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, reinterpret_cast<const char*>(with) + at, sizeof fd);
        all.emplace_back(fd);
      }
    }
    const bool one = all.size() == 1 && (header.msg_flags & MSG_CTRUNC) == 0;
    return one ? std::move(all.front()) : Descriptor();
  }
};

}  // namespace

SocketName::SocketName(const std::string& text) {
  if (text.size() + 1 > sizeof name.sun_path) refuse("socket name", ENAMETOOLONG);
  name.sun_family = AF_UNIX;  // a zero before the name makes it abstract
  std::memcpy(name.sun_path + 1, text.data(), text.size());
  bytes = offsetof(sockaddr_un, sun_path) + 1 + text.size();
}

Descriptor make_socket(int type) {
  Descriptor socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!socket) refuse("cannot make a Unix socket", errno);
  return socket;
}

Descriptor make_socket(int type, const std::string& name) {
  Descriptor socket = make_socket(type);
  const SocketName here(name);
  if (bind(socket.get(), here.get(), here.bytes) != 0) refuse("cannot bind a Unix socket", errno);
  return socket;
}

bool is_of_own_user(const Descriptor& connection, bool or_root) {
  ucred other = {};
  socklen_t bytes = sizeof other;
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &other, &bytes) != 0) return false;
  return other.uid == geteuid() || other.uid == getuid() || (or_root && other.uid == 0);
}

bool send_fd(int socket, uint64_t number, int carried) {
  SocketMessage message;
  message.number = number;
  if (carried >= 0) message.carry(carried);
  for (;;) {
    if (sendmsg(socket, &message.header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return true;
    if (errno != EINTR) return false;
  }
}

std::optional<FdMessage> receive_fd(int socket, int flags) {
  SocketMessage message;
  message.make_room();
  const ssize_t got = recvmsg(socket, &message.header, flags | MSG_CMSG_CLOEXEC);
  if (got == 0) errno = ECONNRESET;
  if (got <= 0) return {};
  FdMessage fd_message{message.number, message.carried()};
  if (got != sizeof message.number) fd_message.number = 0;
  return fd_message;
}

}  // namespace pycollect::shm
