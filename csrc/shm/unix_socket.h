// Unix sockets without a file, and letters between them: one number, which may carry a descriptor.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>

#include <optional>
#include <string>

#include "system.h"

namespace pycollect::shm {

// A name in no folder, gone with the socket that has it; throws if it is too long.
struct SocketName {
  sockaddr_un name = {};
  socklen_t bytes = 0;
  explicit SocketName(const std::string& text);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

Descriptor make_socket(int type);
// As another process finds it by this name.
Descriptor make_socket(int type, const std::string& name);

struct Letter {
  uint64_t number = 0;  // 0: not one of ours
  Descriptor carried = Descriptor();
};
// Is the other end of a connection a process of this one's user, or of root's if that is as good?
bool is_of_own_user(const Descriptor& connection, bool or_root);
// With no descriptor if it is negative. False: not, and errno says why.
bool send_letter(int socket, uint64_t number, int carried);
// Nothing: errno says why, as ECONNRESET when the other end has gone, and EINTR after a signal.
// `flags` are those of recvmsg. Of a letter that carries several descriptors, none is kept.
std::optional<Letter> receive_letter(int socket, int flags);

}  // namespace pycollect::shm
