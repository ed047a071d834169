#include "fd_server.h"

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

#include "../group/new_thread.h"
#include "../plan/error.h"
#include "unix_socket.h"

namespace pycollect::ipc {
namespace {

// Time after which a client that sent no request is disconnected, and the interval of that check.
constexpr std::chrono::milliseconds kRequestTimeout{1000}, kClientCheckInterval{100};
// Maximum number of connected clients, twice the ranks of the largest group. Others stay queued.
constexpr int kMostClients = 128;
// Delay before a disconnected client tries again.
constexpr std::chrono::milliseconds kRetryDelay{5};
// Delay before the next accept when the process has run out of descriptors.
constexpr std::chrono::milliseconds kAcceptRetryDelay{10};

std::string name_of(uint64_t fd_server) {
  return text("pycollect-fd-server-", hexadecimal(fd_server));
}

UniqueFd make_listener(uint64_t fd_server) {
  UniqueFd socket = make_socket(SOCK_SEQPACKET | SOCK_NONBLOCK, name_of(fd_server));
  if (listen(socket.get(), kMostClients) != 0) refuse("cannot listen on a Unix socket", errno);
  return socket;
}

// Returns an eventfd that ends the server when it is readable: shutting the socket down does not
// wake `poll` on every kernel.
UniqueFd make_end_event() {
  UniqueFd event(eventfd(0, EFD_CLOEXEC));
  if (!event) refuse("cannot make an eventfd", errno);
  return event;
}

// Limits the time of `connect` and `recvmsg` on the socket.
void set_time_limit(int socket, Deadline deadline) {
  using std::chrono::microseconds;
  const auto left = std::chrono::duration_cast<microseconds>(deadline - Clock::now()).count();
  constexpr int64_t kSecond = 1'000'000, kLeast = 1000;  // zero would mean no limit
  const timeval time = {std::max(left, kLeast) / kSecond, std::max(left, kLeast) % kSecond};
  for (const int what : {SO_SNDTIMEO, SO_RCVTIMEO})
    if (setsockopt(socket, SOL_SOCKET, what, &time, sizeof time) != 0)
      refuse("cannot limit the time of a Unix socket", errno);
}

// Repeats `act` when a signal interrupts it (a profiler's arrive every few milliseconds), with the
// time limit reduced to the time until the deadline.
template <class Act>
void retry_until(int socket, Deadline deadline, const Act& act) {
  do set_time_limit(socket, deadline);
  while (!act() && errno == EINTR && Clock::now() < deadline);
}

// Sends a request and returns the answer. A rejected client may have an answer queued, which the
// kernel delivers only after it has reported ECONNRESET.
std::optional<FdMessage> request(int socket, uint64_t number, Deadline deadline) {
  if (!send_fd(socket, number, -1) && errno != EPIPE && errno != ECONNRESET)
    refuse("cannot request the descriptor", errno);
  std::optional<FdMessage> fd_message;
  retry_until(socket, deadline, [&] { return (fd_message = receive_fd(socket, 0)).has_value(); });
  if (!fd_message && errno == ECONNRESET) fd_message = receive_fd(socket, MSG_DONTWAIT);
  return fd_message;
}

}  // namespace

// The descriptors of a server. A forked child closes them: otherwise clients could not detect that
// the parent has exited, and offered descriptors would stay open as long as the child lives.
struct FdServer::OpenSockets {
  struct FdClient {
    UniqueFd connection;
    Deadline deadline;  // its request must have arrived by then
  };

  OpenSockets() {
    const std::lock_guard lock(all_mutex);
    all.insert(this);
  }
  ~OpenSockets() {
    const std::lock_guard lock(all_mutex);
    all.erase(this);
    close();
  }
  OpenSockets(const OpenSockets&) = delete;
  OpenSockets& operator=(const OpenSockets&) = delete;

  std::mutex mutex;  // held while a descriptor is opened or closed
  UniqueFd listener;
  std::vector<FdClient> clients;  // only changed by the server thread
  std::map<uint64_t, UniqueFd> offered;

 private:
  void close() {
    listener = UniqueFd();
    clients.clear();
    offered.clear();
  }
  static void before_fork() {
    all_mutex.lock();
    for (OpenSockets* const open : all) open->mutex.lock();
  }
  static void in_parent() {
    for (OpenSockets* const open : all) open->mutex.unlock();
    all_mutex.unlock();
  }
  static void in_child() {
    for (OpenSockets* const open : all) open->close();
    in_parent();
  }

  static inline std::mutex all_mutex;
  static inline std::set<OpenSockets*>& all = *new std::set<OpenSockets*>;
  [[maybe_unused]] static inline const int registered =
      pthread_atfork(before_fork, in_parent, in_child);
};

FdServer::FdServer()
    : name_(random_number()), open_(std::make_unique<OpenSockets>()), end_(make_end_event()) {
  {
    const std::lock_guard lock(open_->mutex);
    open_->listener = make_listener(name_);
  }
  thread_ = std::make_unique<std::thread>(new_thread_without_signals([this] { serve(); }));
}

FdServer::~FdServer() {
  if (fork_guard_.forked()) {
    static_cast<void>(thread_.release());  // the thread exists only in the parent process
    return;
  }
  eventfd_write(end_.get(), 1);
  thread_->join();
}

FdServer::FdTicket FdServer::offer(UniqueFd descriptor) {
  const std::lock_guard lock(open_->mutex);
  const FdTicket ticket{name_, random_number()};
  open_->offered.emplace(ticket.number, std::move(descriptor));
  return ticket;
}

void FdServer::serve() {
  pthread_setname_np(pthread_self(), "pycollect fds");
  std::vector<OpenSockets::FdClient>& clients = open_->clients;
  std::vector<pollfd> polled;
  for (;;) {
    polled = {{end_.get(), POLLIN, 0}, {open_->listener.get(), POLLIN, 0}};
    if (clients.size() >= kMostClients) polled[1].fd = -1;  // poll ignores a negative descriptor
    for (const auto& it : clients) polled.push_back({it.connection.get(), POLLIN, 0});
    const int timeout_ms = clients.empty() ? -1 : static_cast<int>(kClientCheckInterval.count());
    if (poll(polled.data(), polled.size(), timeout_ms) < 0) continue;  // a signal
    if (polled[0].revents != 0) return;
    const auto now = Clock::now();
    auto poll_result = polled.begin() + 2;
    {
      const std::lock_guard lock(open_->mutex);
      std::erase_if(clients, [&](const OpenSockets::FdClient& it) {
        const bool has_request = (poll_result++)->revents != 0;
        if (has_request) answer(it.connection);
        return has_request || now >= it.deadline;
      });
    }
    if (polled[1].revents != 0) accept_client();
  }
}

void FdServer::accept_client() {
  std::unique_lock lock(open_->mutex);
  UniqueFd client(accept4(open_->listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client) {
    const int why = errno;
    lock.unlock();
    if (why == EMFILE || why == ENFILE || why == ENOBUFS || why == ENOMEM)
      std::this_thread::sleep_for(kAcceptRetryDelay);
  } else if (is_of_own_user(client, true)) {
    open_->clients.push_back({std::move(client), Clock::now() + kRequestTimeout});
  } else {
    send_fd(client.get(), 0, -1);
  }
}

// Answers one request, under the lock. A client that has disconnected meanwhile gets no answer.
void FdServer::answer(const UniqueFd& connection) {
  const auto asked = receive_fd(connection.get(), MSG_DONTWAIT);
  if (!asked) return;
  const auto found = open_->offered.find(asked->number);
  if (found != open_->offered.end())
    send_fd(connection.get(), asked->number, found->second.get());
  else
    send_fd(connection.get(), 0, -1);
}

UniqueFd fetch(const FdServer::FdTicket& ticket, Deadline deadline) {
  const SocketName name(name_of(ticket.fd_server));
  for (;; std::this_thread::sleep_for(kRetryDelay)) {
    const UniqueFd socket = make_socket(SOCK_SEQPACKET);
    int failed = 0;
    retry_until(socket.get(), deadline,
                [&] { return (failed = connect(socket.get(), name.get(), name.bytes)) == 0; });
    if (failed != 0)
      refuse(
          text("cannot reach the Unix socket @", name_of(ticket.fd_server), " of the process that ",
               "offers the descriptor, which must be alive and in the same network namespace"),
          errno);
    if (!is_of_own_user(socket, false) && geteuid() != 0)
      throw std::runtime_error(
          "the process that offers the descriptor is run by another user; only its own user and "
          "root are admitted");
    auto fd_message = request(socket.get(), ticket.number, deadline);
    if (!fd_message) {
      const int why = errno;
      // The server disconnected this client because its request was late, or the server has just
      // ended and the next `connect` fails.
      if (why == ECONNRESET && Clock::now() < deadline) continue;
      refuse("the process that offers the descriptor does not answer", why);
    }
    if (fd_message->number == 0)
      throw std::runtime_error("the process no longer offers the descriptor, or not to this user");
    if (!fd_message->descriptor) refuse("cannot receive the descriptor", EMFILE);
    return std::move(fd_message->descriptor);
  }
}

}  // namespace pycollect::ipc
