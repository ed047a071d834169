// The fd server: a thread that sends a file descriptor (SCM_RIGHTS over an abstract Unix socket) to
// every process of this host that connects. Unlike pidfd_getfd, this needs no permission to trace
// the process. Clients must be of the same user, or root, which may read any descriptor anyway.
//
// It is a thread because rank 0 waits in the store meanwhile: the other ranks need the shared
// memory before all have joined, so that the death of one is noticed by those that wait for others.
#pragma once
#include <memory>
#include <string>
#include <thread>

#include "system.h"
#include "wait.h"

namespace pycollect::ipc {

class FdServer {
 public:
  explicit FdServer(int descriptor);  // which must stay open while the server exists
  ~FdServer();                        // afterwards the descriptor can no longer be fetched

  uint64_t id() const { return id_; }  // random, never 0; the argument of `fetch`

 private:
  const uint64_t id_;
  const ForkGuard fork_guard_;  // a forked child has no server thread
  // Ends the server when it is readable: shutting the socket down does not wake `poll` on every
  // kernel.
  const UniqueFd end_;
  UniqueFd listener_;
  std::unique_ptr<std::thread> thread_;
};

// Returns the name of an fd server's socket: abstract, that is, after a zero byte.
std::string fd_server_name(uint64_t id);

// Fetches the descriptor of an fd server. Throws std::runtime_error with the cause: a
// std::system_error with EAGAIN after the deadline, ECONNREFUSED if the server does not exist.
UniqueFd fetch(uint64_t id, Deadline deadline);

}  // namespace pycollect::ipc
