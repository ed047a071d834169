#include "hatch.h"

#include <cerrno>
#include <chrono>
#include <thread>

#include "../plan/error.h"
#include "unix_socket.h"

namespace pycollect::shm {
namespace {

// For a full queue to be sorted out: twice as long as who waits for memory takes to look. See
// meeting.cpp.
constexpr std::chrono::milliseconds kPatience{1000}, kPause{1};

}  // namespace

Hatch::Hatch()
    : address_(text("pycollect-", hexadecimal(random_number()), hexadecimal(random_number()))),
      socket_(make_socket(SOCK_DGRAM)) {
  ask_for_senders(socket_);  // before anybody can find it
  bind_to(socket_, address_);
}

void Hatch::sort(uint64_t token) {
  while (auto letter = receive_letter(socket_.get(), MSG_DONTWAIT))
    if (letter->number == token && letter->by_own_user && !found_)
      found_.emplace(std::move(letter->carried));
}

Descriptor Hatch::take(uint64_t token) {
  sort(token);
  if (!found_) refuse("rank 0 did not hand over the shared memory", EAGAIN);
  if (!*found_) refuse("cannot take the shared memory from rank 0", EMFILE);
  return std::move(*found_);
}

void hand_in(const std::string& address, int fd, uint64_t token) {
  const SocketName there(address);
  const Descriptor socket = make_socket(SOCK_DGRAM);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!send_letter(socket.get(), token, fd, &there)) {
    if (errno != EAGAIN || std::chrono::steady_clock::now() >= end)
      refuse("cannot reach another rank's Unix socket, which must be in the same network namespace",
             errno);
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace pycollect::shm
