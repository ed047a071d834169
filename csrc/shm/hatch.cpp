#include "hatch.h"

#include <cerrno>

#include "../plan/error.h"
#include "unix_socket.h"

namespace pycollect::shm {

Hatch::Hatch()
    : address_(text("pycollect-", hexadecimal(random_number()), hexadecimal(random_number()))),
      socket_(make_socket(SOCK_DGRAM, address_)) {}

Descriptor Hatch::take(uint64_t token) {
  for (;;) {
    auto letter = receive_letter(socket_.get(), MSG_DONTWAIT);
    if (!letter) refuse("rank 0 did not hand over the shared memory", errno);
    if (letter->number != token) continue;  // a stranger's
    if (!letter->carried) refuse("cannot take the shared memory from rank 0", EMFILE);
    return std::move(letter->carried);
  }
}

void hand_in(const std::string& address, int fd, uint64_t token) {
  const SocketName there(address);
  if (!send_letter(make_socket(SOCK_DGRAM).get(), token, fd, &there))
    refuse("cannot reach its Unix socket", errno);
}

}  // namespace pycollect::shm
