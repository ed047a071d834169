// Abstract Unix sockets, and fd messages (SCM_RIGHTS): a number and an optional descriptor.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>

#include <optional>
#include <string>

#include "../group/system.h"

namespace pycollect::ipc {

// An abstract socket name: not in the file system, and removed with its socket. Throws if `text` is
// too long.
struct SocketName {
  sockaddr_un name = {};
  socklen_t bytes = 0;
  explicit SocketName(const std::string& text);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

UniqueFd make_socket(int type);
// Makes a socket bound to `name`, to which other processes can connect.
UniqueFd make_socket(int type, const std::string& name);

struct FdMessage {
  uint64_t number = 0;  // 0: refused, or not a valid fd message
  UniqueFd descriptor = UniqueFd();
};
// Returns true if the other end of a connection is a process of the same user or, with `or_root`,
// of root.
bool is_of_own_user(const UniqueFd& connection, bool or_root);
// Sends an fd message; a negative `descriptor` sends the number alone. Returns false on failure,
// with the reason in errno.
bool send_fd(int socket, uint64_t number, int descriptor);
// Receives an fd message; `flags` are those of recvmsg. Returns none on failure, with the reason in
// errno: ECONNRESET when the other end has closed, EINTR after a signal. If a message carries
// several descriptors, all are closed.
std::optional<FdMessage> receive_fd(int socket, int flags);

}  // namespace pycollect::ipc
