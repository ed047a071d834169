// The fd server: a thread that sends offered file descriptors (SCM_RIGHTS over an abstract Unix
// socket) to processes of this host that present the descriptor's random number. Unlike
// pidfd_getfd, this needs no permission to trace the process. Clients must be of the same user, or
// root, which may read any descriptor anyway.
#pragma once
#include <memory>
#include <thread>

#include "../group/fork_guard.h"
#include "../group/system.h"
#include "store.h"

namespace pycollect::ipc {

class FdServer {
 public:
  FdServer();
  ~FdServer();  // ends the server: offered descriptors can no longer be fetched
  FdServer(const FdServer&) = delete;
  FdServer& operator=(const FdServer&) = delete;

  // Key of an offered descriptor: the server and the entry. Both numbers are random, so only
  // processes that were given the ticket can fetch the descriptor.
  struct FdTicket {
    uint64_t fd_server, number;
  };
  FdTicket offer(UniqueFd descriptor);

 private:
  struct OpenSockets;  // fd_server.cpp: the descriptors that a forked child closes
  void serve();
  void accept_client();
  void answer(const UniqueFd& connection);

  const uint64_t name_;
  const ForkGuard fork_guard_;  // a forked child has no server thread
  // The sockets are on the heap, because the server may lie on a stack that a forked child does not
  // keep.
  const std::unique_ptr<OpenSockets> open_;
  const UniqueFd end_;
  std::unique_ptr<std::thread> thread_;
};

// Time limit of a fetch, which takes microseconds unless cores are scarce or a process is stopped.
inline constexpr std::chrono::milliseconds kFetchTimeout{10'000};
// Fetches a descriptor offered by any process. Throws std::runtime_error with the cause: a
// std::system_error with EAGAIN after the deadline, ECONNREFUSED if the server does not exist.
UniqueFd fetch(const FdServer::FdTicket& ticket, Deadline deadline = deadline_after(kFetchTimeout));

}  // namespace pycollect::ipc
