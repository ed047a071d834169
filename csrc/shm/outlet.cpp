#include "outlet.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "../plan/error.h"
#include "new_thread.h"
#include "unix_socket.h"

namespace pycollect::shm {
namespace {

// Who is let in and says nothing for so long is put out again, and how often to look for such.
constexpr std::chrono::milliseconds kForQuestions{1000}, kLook{100};
// As many callers as there can be ranks may come at once; the others wait until one has gone.
constexpr int kCallers = 128;
// Until whoever was put out asks again.
constexpr std::chrono::milliseconds kPutOut{5};
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

// Of connecting, and of receiving.
void limit(int socket, Deadline deadline) {
  using std::chrono::microseconds;
  const auto left = std::chrono::duration_cast<microseconds>(deadline - Clock::now()).count();
  constexpr int64_t kSecond = 1'000'000, kLeast = 1000;  // none at all is for ever
  const timeval time = {std::max(left, kLeast) / kSecond, std::max(left, kLeast) % kSecond};
  for (const int what : {SO_SNDTIMEO, SO_RCVTIMEO})
    if (setsockopt(socket, SOL_SOCKET, what, &time, sizeof time) != 0)
      refuse("cannot limit the time of a Unix socket", errno);
}

// A signal ends a wait, as a profiler's do every few milliseconds: it is begun again, for what is
// left of the time.
template <class Act>
void until(int socket, Deadline deadline, const Act& act) {
  do limit(socket, deadline);
  while (!act() && errno == EINTR && Clock::now() < deadline);
}

// Whoever is put out may have been told why, which the kernel keeps behind what it says itself.
std::optional<Letter> ask(int socket, uint64_t number, Deadline deadline) {
  if (!send_letter(socket, number, -1) && errno != EPIPE && errno != ECONNRESET)
    refuse("cannot ask for it", errno);
  std::optional<Letter> letter;
  until(socket, deadline, [&] { return (letter = receive_letter(socket, 0)).has_value(); });
  if (!letter && errno == ECONNRESET) letter = receive_letter(socket, MSG_DONTWAIT);
  return letter;
}

}  // namespace

// A forked child closes it: else nobody would be told when its parent has gone, and what that
// offered would stay for as long as the child.
struct Outlet::Open {
  struct Caller {
    Descriptor connection;
    Deadline until;  // its question must have come
  };

  Open() {
    const std::lock_guard hold(listing);
    all.insert(this);
  }
  ~Open() {
    const std::lock_guard hold(listing);
    all.erase(this);
    close();
  }
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;

  std::mutex mutex;  // held while something is opened or closed
  Descriptor listening;
  std::vector<Caller> callers;  // only changed by the outlet's thread
  std::map<uint64_t, Descriptor> offered;

 private:
  void close() {
    listening = Descriptor();
    callers.clear();
    offered.clear();
  }
  static void before_fork() {
    listing.lock();
    for (Open* const open : all) open->mutex.lock();
  }
  static void in_parent() {
    for (Open* const open : all) open->mutex.unlock();
    listing.unlock();
  }
  static void in_child() {
    for (Open* const open : all) open->close();
    in_parent();
  }

  static inline std::mutex listing;
  static inline std::set<Open*>& all = *new std::set<Open*>;
  [[maybe_unused]] static inline const int registered =
      pthread_atfork(before_fork, in_parent, in_child);
};

Outlet::Outlet() : name_(random_number()), open_(std::make_unique<Open>()), end_(ending()) {
  {
    const std::lock_guard lock(open_->mutex);
    open_->listening = listening(name_);
  }
  thread_ = std::make_unique<std::thread>(new_thread_without_signals([this] { serve(); }));
}

Outlet::~Outlet() {
  if (!origin_.is_here()) {
    static_cast<void>(thread_.release());  // it stayed with the parent: nothing here is that thread
    return;
  }
  eventfd_write(end_.get(), 1);
  thread_->join();
}

Outlet::Ticket Outlet::offer(Descriptor descriptor) {
  const std::lock_guard lock(open_->mutex);
  const Ticket ticket{name_, random_number()};
  open_->offered.emplace(ticket.number, std::move(descriptor));
  return ticket;
}

void Outlet::withdraw(const Ticket& ticket) noexcept {
  const std::lock_guard lock(open_->mutex);
  open_->offered.erase(ticket.number);
}

void Outlet::serve() {
  pthread_setname_np(pthread_self(), "pycollect fds");
  std::vector<Open::Caller>& callers = open_->callers;
  std::vector<pollfd> polled;
  for (;;) {
    polled = {{end_.get(), POLLIN, 0}, {open_->listening.get(), POLLIN, 0}};
    if (callers.size() >= kCallers) polled[1].fd = -1;  // which poll passes over
    for (const auto& it : callers) polled.push_back({it.connection.get(), POLLIN, 0});
    const int most = callers.empty() ? -1 : static_cast<int>(kLook.count());
    if (poll(polled.data(), polled.size(), most) < 0) continue;  // a signal
    if (polled[0].revents != 0) return;
    const auto now = Clock::now();
    auto said = polled.begin() + 2;
    {
      const std::lock_guard lock(open_->mutex);
      std::erase_if(callers, [&](const Open::Caller& it) {
        const bool asks = (said++)->revents != 0;
        if (asks) answer(it.connection);
        return asks || now >= it.until;
      });
    }
    if (polled[1].revents != 0) let_in();
  }
}

void Outlet::let_in() {
  std::unique_lock lock(open_->mutex);
  Descriptor caller(accept4(open_->listening.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!caller) {
    const int why = errno;
    lock.unlock();
    if (why == EMFILE || why == ENFILE || why == ENOBUFS || why == ENOMEM)
      std::this_thread::sleep_for(kShortage);
  } else if (is_of_own_user(caller, true)) {
    open_->callers.push_back({std::move(caller), Clock::now() + kForQuestions});
  } else {
    send_letter(caller.get(), 0, -1);
  }
}

// Under the lock. Whoever has gone meanwhile needs no answer.
void Outlet::answer(const Descriptor& connection) {
  const auto asked = receive_letter(connection.get(), MSG_DONTWAIT);
  if (!asked) return;
  const auto found = open_->offered.find(asked->number);
  if (found != open_->offered.end())
    send_letter(connection.get(), asked->number, found->second.get());
  else
    send_letter(connection.get(), 0, -1);
}

Descriptor fetch(const Outlet::Ticket& ticket, Deadline deadline) {
  const SocketName there(name_of(ticket.outlet));
  for (;; std::this_thread::sleep_for(kPutOut)) {
    const Descriptor socket = make_socket(SOCK_SEQPACKET);
    int failed = 0;
    until(socket.get(), deadline,
          [&] { return (failed = connect(socket.get(), there.get(), there.bytes)) == 0; });
    if (failed != 0)
      refuse(text("cannot reach the Unix socket @", name_of(ticket.outlet), " of the process that ",
                  "offers it, which must be alive and in the same network namespace"),
             errno);
    if (!is_of_own_user(socket, false) && geteuid() != 0)
      throw std::runtime_error(
          "the process that offers it is run by another user, and lets none in");
    auto letter = ask(socket.get(), ticket.number, deadline);
    if (!letter) {
      const int why = errno;
      // Put out, because this process did not run for a while; or the other has just gone, and is
      // not there the next time.
      if (why == ECONNRESET && Clock::now() < deadline) continue;
      refuse("the process that offers it does not answer", why);
    }
    if (letter->number == 0)
      throw std::runtime_error(
          "the process that offered it does not offer it any more, or not to this user");
    if (!letter->carried) refuse("cannot take it", EMFILE);
    return std::move(letter->carried);
  }
}

}  // namespace pycollect::shm
