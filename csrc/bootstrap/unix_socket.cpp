#include "unix_socket.h"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

namespace pycollect::ipc {
namespace {

struct SocketMessage {
  uint64_t number = 0;
  iovec data = {&number, sizeof number};
  // `control` is sized for one descriptor; its padding makes room for a second one.
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  SocketMessage() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
  }
  SocketMessage(const SocketMessage&) = delete;
  SocketMessage& operator=(const SocketMessage&) = delete;

  void reserve_control() {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  void attach(int fd) {
    reserve_control();
    cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(cmsg), &fd, sizeof fd);
  }
  // Returns the received descriptor if there is exactly one, and closes all others: received
  // descriptors are open in this process.
  UniqueFd take_descriptor() {
    std::vector<UniqueFd> all;
    for (cmsghdr* cmsg = CMSG_FIRSTHDR(&header); cmsg != nullptr;
         cmsg = CMSG_NXTHDR(&header, cmsg)) {
      if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS) continue;
      for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= cmsg->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, reinterpret_cast<const char*>(cmsg) + at, sizeof fd);
        all.emplace_back(fd);
      }
    }
    const bool one = all.size() == 1 && (header.msg_flags & MSG_CTRUNC) == 0;
    return one ? std::move(all.front()) : UniqueFd();
  }
};

}  // namespace

SocketName::SocketName(const std::string& text) {
  if (text.size() + 1 > sizeof name.sun_path) refuse("socket name", ENAMETOOLONG);
  name.sun_family = AF_UNIX;  // a zero before the name makes it abstract
  std::memcpy(name.sun_path + 1, text.data(), text.size());
  bytes = offsetof(sockaddr_un, sun_path) + 1 + text.size();
}

UniqueFd make_socket(int type) {
  UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!socket) refuse("cannot make a Unix socket", errno);
  return socket;
}

UniqueFd make_socket(int type, const std::string& name) {
  UniqueFd socket = make_socket(type);
  const SocketName address(name);
  if (bind(socket.get(), address.get(), address.bytes) != 0)
    refuse("cannot bind a Unix socket", errno);
  return socket;
}

bool is_of_own_user(const UniqueFd& connection, bool or_root) {
  ucred other = {};
  socklen_t bytes = sizeof other;
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &other, &bytes) != 0) return false;
  return other.uid == geteuid() || other.uid == getuid() || (or_root && other.uid == 0);
}

bool send_fd(int socket, uint64_t number, int descriptor) {
  SocketMessage message;
  message.number = number;
  if (descriptor >= 0) message.attach(descriptor);
  for (;;) {
    if (sendmsg(socket, &message.header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return true;
    if (errno != EINTR) return false;
  }
}

std::optional<FdMessage> receive_fd(int socket, int flags) {
  SocketMessage message;
  message.reserve_control();
  const ssize_t got = recvmsg(socket, &message.header, flags | MSG_CMSG_CLOEXEC);
  if (got == 0) errno = ECONNRESET;
  if (got <= 0) return {};
  FdMessage fd_message{message.number, message.take_descriptor()};
  if (got != sizeof message.number) fd_message.number = 0;
  return fd_message;
}

}  // namespace pycollect::ipc
