#include "outlet.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/time.h>

#include <cerrno>
#include <chrono>
#include <stdexcept>

#include "../plan/error.h"
#include "unix_socket.h"

namespace pycollect::shm {
namespace {

// An answer takes microseconds, and longer only if cores are short. Who asks waits for so long.
constexpr timeval kLongest = {10, 0};
// Who is let in and then says nothing holds up the others for so long.
constexpr timeval kForQuestions = {1, 0};
// As many callers as there can be ranks may come at once.
constexpr int kCallers = 128;
// Until a process that has no descriptor left for a caller may have one again.
constexpr std::chrono::milliseconds kShortage{10};

std::string name_of(uint64_t outlet) { return text("pycollect-outlet-", hexadecimal(outlet)); }

Descriptor listening(uint64_t outlet) {
  Descriptor socket = make_socket(SOCK_SEQPACKET | SOCK_NONBLOCK, name_of(outlet));
  if (listen(socket.get(), kCallers) != 0) refuse("cannot listen on a Unix socket", errno);
  return socket;
}

// Readable when the outlet is to end: to shut the socket does not wake everybody's kernel.
Descriptor ending() {
  Descriptor event(eventfd(0, EFD_CLOEXEC));
  if (!event) refuse("cannot make an eventfd", errno);
  return event;
}

void limit(const Descriptor& socket, const timeval& time) {
  if (setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time) != 0)
    refuse("cannot limit the time of a Unix socket", errno);
}

}  // namespace

Outlet::Outlet()
    : name_(random_number()),
      listening_(listening(name_)),
      end_(ending()),
      thread_([this] { serve(); }) {}

Outlet::~Outlet() {
  if (origin_.is_here()) {
    eventfd_write(end_.get(), 1);
    thread_.join();
  } else {
    thread_.detach();
  }
}

Outlet::Ticket Outlet::offer(Descriptor descriptor) {
  const std::lock_guard lock(mutex_);
  const Ticket ticket{name_, random_number()};
  offered_.emplace(ticket.number, std::move(descriptor));
  return ticket;
}

void Outlet::withdraw(const Ticket& ticket) noexcept {
  const std::lock_guard lock(mutex_);
  offered_.erase(ticket.number);
}

void Outlet::serve() {
  pthread_setname_np(pthread_self(), "pycollect fds");
  pollfd both[] = {{listening_.get(), POLLIN, 0}, {end_.get(), POLLIN, 0}};
  while (both[1].revents == 0) {
    if (poll(both, 2, -1) < 0 || both[0].revents == 0) continue;  // a signal, or the end
    const Descriptor caller(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (caller)
      answer(caller);
    else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
      std::this_thread::sleep_for(kShortage);
  }
}

// Whoever has gone meanwhile needs no answer.
void Outlet::answer(const Descriptor& caller) {
  setsockopt(caller.get(), SOL_SOCKET, SO_RCVTIMEO, &kForQuestions, sizeof kForQuestions);
  const auto asked = receive_letter(caller.get(), 0);
  if (!asked) return;
  const std::lock_guard lock(mutex_);
  const auto found = offered_.find(asked->number);
  if (found != offered_.end())
    send_letter(caller.get(), asked->number, found->second.get());
  else
    send_letter(caller.get(), 0, -1);
}

Descriptor fetch(const Outlet::Ticket& ticket) {
  const Descriptor socket = make_socket(SOCK_SEQPACKET);
  const SocketName there(name_of(ticket.outlet));
  limit(socket, kLongest);
  if (setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &kLongest, sizeof kLongest) != 0 ||
      connect(socket.get(), there.get(), there.bytes) != 0)
    refuse(
        "cannot reach the process that offers it, which must be alive and in the same network "
        "namespace",
        errno);
  if (!send_letter(socket.get(), ticket.number, -1)) refuse("cannot ask for it", errno);
  auto letter = receive_letter(socket.get(), 0);
  if (!letter) refuse("the process that offers it does not answer", errno);
  if (letter->number == 0)
    throw std::runtime_error("the process that offered it does not offer it any more");
  if (!letter->carried) refuse("cannot take it", EMFILE);
  return std::move(letter->carried);
}

}  // namespace pycollect::shm
