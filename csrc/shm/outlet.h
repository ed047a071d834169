// Where other processes of this host fetch descriptors of this one, whenever they like and whatever
// it is doing: a socket without a file, and a thread that answers whoever knows a number. Nobody
// needs leave to trace anybody, as to take descriptors out of a process does; of other users only
// root is let in, who may take anything.
#pragma once
#include <memory>
#include <thread>

#include "board.h"
#include "system.h"

namespace pycollect::shm {

class Outlet {
 public:
  Outlet();
  ~Outlet();  // nobody fetches anything any more
  Outlet(const Outlet&) = delete;
  Outlet& operator=(const Outlet&) = delete;

  // What `fetch` asks for: where, and what. Random, so that only those know it who were told.
  struct Ticket {
    uint64_t outlet, number;
  };
  Ticket offer(Descriptor descriptor);
  void withdraw(const Ticket& ticket) noexcept;

 private:
  struct Open;  // outlet.cpp: what a forked child closes
  void serve();
  void let_in();
  void answer(const Descriptor& connection);

  const uint64_t name_;
  const Origin origin_;  // a forked child has no such thread
  // Not part of this, which may lie on a stack that a forked child does not keep.
  const std::unique_ptr<Open> open_;
  const Descriptor end_;
  std::unique_ptr<std::thread> thread_;
};

// An answer takes microseconds, and longer only if cores are short, or the process is stopped.
inline constexpr std::chrono::milliseconds kForAnswers{10'000};
// From any process. Throws std::runtime_error with what is in the way: a std::system_error with
// EAGAIN when the time is over, ECONNREFUSED where there is no such outlet (any more).
Descriptor fetch(const Outlet::Ticket& ticket, Deadline deadline = deadline_after(kForAnswers));

}  // namespace pycollect::shm
