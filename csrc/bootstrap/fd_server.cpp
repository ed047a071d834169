#include "fd_server.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <vector>

#include "../group/new_thread.h"
#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// Maximum number of clients that wait for the server thread, twice the ranks of the largest group.
// Others wait in `connect`.
constexpr int kMostClients = 128;
// Delay before a client that got no answer tries again.
constexpr std::chrono::milliseconds kRetryDelay{5};
// Delay before the next accept when the process has run out of descriptors.
constexpr std::chrono::milliseconds kAcceptRetryDelay{10};

struct ServerAddress {
  sockaddr_un name = {};
  socklen_t bytes = 0;
  explicit ServerAddress(uint64_t id) {
    const std::string text = fd_server_name(id);
    name.sun_family = AF_UNIX;  // a zero before the name makes it abstract
    text.copy(name.sun_path + 1, sizeof name.sun_path - 1);
    bytes = offsetof(sockaddr_un, sun_path) + 1 + text.size();
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

UniqueFd make_socket(int flags) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!socket) refuse("cannot make a Unix socket", errno);
  return socket;
}

UniqueFd make_listener(uint64_t id) {
  UniqueFd socket = make_socket(SOCK_NONBLOCK);
  const ServerAddress address(id);
  if (bind(socket.get(), address.get(), address.bytes) != 0)
    refuse("cannot bind a Unix socket", errno);
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

// Returns true if the other end of a connection is a process of the same user or, with `or_root`,
// of root.
bool is_of_own_user(const UniqueFd& connection, bool or_root) {
  ucred other = {};
  socklen_t bytes = sizeof other;
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &other, &bytes) != 0) return false;
  return other.uid == geteuid() || other.uid == getuid() || (or_root && other.uid == 0);
}

// An answer of the server: whether it grants the request, and the descriptor.
struct FdMessage {
  char granted = 0;
  iovec data = {&granted, sizeof granted};
  // `control` is sized for one descriptor; its padding makes room for a second one.
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  FdMessage() {
    header.msg_iov = &data, header.msg_iovlen = 1;
    header.msg_control = control.data(), header.msg_controllen = control.size();
  }
  FdMessage(const FdMessage&) = delete;
  FdMessage& operator=(const FdMessage&) = delete;

  // Fails if the client has disconnected; it then needs no answer.
  void send(const UniqueFd& connection, int descriptor) {
    granted = descriptor >= 0;
    if (granted) {
      cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
      cmsg->cmsg_level = SOL_SOCKET;
      cmsg->cmsg_type = SCM_RIGHTS;
      cmsg->cmsg_len = CMSG_LEN(sizeof descriptor);
      std::memcpy(CMSG_DATA(cmsg), &descriptor, sizeof descriptor);
    } else {
      header.msg_controllen = 0;
    }
    while (sendmsg(connection.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EINTR)
      continue;
  }

  // Returns the received descriptor if there is exactly one, and closes all others: received
  // descriptors are open in this process.
  UniqueFd take_descriptor() {
    std::vector<UniqueFd> all;
    for (cmsghdr* cmsg = CMSG_FIRSTHDR(&header); cmsg != nullptr;
         cmsg = CMSG_NXTHDR(&header, cmsg)) {
      if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS) continue;
      for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= cmsg->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, reinterpret_cast<const char*>(cmsg) + at, sizeof fd);
        all.emplace_back(fd);
      }
    }
    const bool one = all.size() == 1 && (header.msg_flags & MSG_CTRUNC) == 0;
    return one ? std::move(all.front()) : UniqueFd();
  }
};

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

// Repeats a system call when a signal interrupts it (a profiler's arrive every few milliseconds),
// with the time limit reduced to the time until the deadline. Returns its result.
template <class Call>
auto retry_until(const UniqueFd& socket, Deadline deadline, const Call& call) {
  for (;;) {
    set_time_limit(socket.get(), deadline);
    const auto result = call();
    if (result >= 0 || errno != EINTR || Clock::now() >= deadline) return result;
  }
}

// Connects to an fd server of this user, or of any if this process is root's.
UniqueFd connect_to(uint64_t id, Deadline deadline) {
  const ServerAddress address(id);
  UniqueFd socket = make_socket(0);
  const auto connects = [&] { return connect(socket.get(), address.get(), address.bytes); };
  if (retry_until(socket, deadline, connects) != 0)
    refuse(
        text("cannot reach the Unix socket @", fd_server_name(id), " of the process that offers ",
             "the descriptor, which must be alive and in the same network namespace"),
        errno);
  if (!is_of_own_user(socket, false) && geteuid() != 0)
    throw std::runtime_error(
        "the process that offers the descriptor is run by another user; only its own user and "
        "root are admitted");
  return socket;
}

}  // namespace

// The descriptors of a server. A forked child closes them: otherwise clients could not detect that
// the parent has exited, and the offered file would stay open as long as the child lives.
struct FdServer::OpenFiles {
  explicit OpenFiles(UniqueFd file) : offered(std::move(file)) {
    const std::lock_guard lock(all_mutex);
    all.insert(this);
  }
  ~OpenFiles() {
    const std::lock_guard lock(all_mutex);
    all.erase(this);
    close();
  }
  OpenFiles(const OpenFiles&) = delete;
  OpenFiles& operator=(const OpenFiles&) = delete;

  // Answers the next client. Returns false if this process cannot open another descriptor.
  bool answer() {
    const std::lock_guard lock(mutex);
    const UniqueFd client(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!client) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
    FdMessage().send(client, is_of_own_user(client, true) ? offered.get() : -1);
    return true;
  }

  std::mutex mutex;  // held while a descriptor is opened or closed
  UniqueFd listener, offered;

 private:
  void close() { listener = UniqueFd(), offered = UniqueFd(); }
  static void before_fork() {
    all_mutex.lock();
    for (OpenFiles* const open : all) open->mutex.lock();
  }
  static void in_parent() {
    for (OpenFiles* const open : all) open->mutex.unlock();
    all_mutex.unlock();
  }
  static void in_child() {
    for (OpenFiles* const open : all) open->close();
    in_parent();
  }

  static inline std::mutex all_mutex;
  static inline std::set<OpenFiles*>& all = *new std::set<OpenFiles*>;
  [[maybe_unused]] static inline const int registered =
      pthread_atfork(before_fork, in_parent, in_child);
};

std::string fd_server_name(uint64_t id) { return text("pycollect-fd-server-", hexadecimal(id)); }

FdServer::FdServer(UniqueFd descriptor)
    : id_(random_number()),
      open_(std::make_unique<OpenFiles>(std::move(descriptor))),
      end_(make_end_event()) {
  {
    const std::lock_guard lock(open_->mutex);
    open_->listener = make_listener(id_);
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

void FdServer::serve() {
  pthread_setname_np(pthread_self(), "pycollect fds");
  for (;;) {
    std::array<pollfd, 2> polled = {pollfd{end_.get(), POLLIN, 0},
                                    {open_->listener.get(), POLLIN, 0}};
    if (poll(polled.data(), polled.size(), -1) < 0) continue;  // a signal
    if (polled[0].revents != 0) return;
    if (!open_->answer()) std::this_thread::sleep_for(kAcceptRetryDelay);
  }
}

UniqueFd fetch(uint64_t id, Deadline deadline) {
  for (;; std::this_thread::sleep_for(kRetryDelay)) {
    const UniqueFd socket = connect_to(id, deadline);
    FdMessage answer;
    const auto got = retry_until(
        socket, deadline, [&] { return recvmsg(socket.get(), &answer.header, MSG_CMSG_CLOEXEC); });
    const int why = got == 0 ? ECONNRESET : errno;
    if (got <= 0) {
      // The server could not send the descriptor, or has just ended and the next `connect` fails.
      if (why == ECONNRESET && Clock::now() < deadline) continue;
      refuse("the process that offers the descriptor does not answer", why);
    }
    UniqueFd descriptor = answer.take_descriptor();
    if (answer.granted == 0)
      throw std::runtime_error("the process that offers the descriptor does not admit this user");
    if (!descriptor) refuse("cannot receive the descriptor", EMFILE);
    return descriptor;
  }
}

}  // namespace pycollect::ipc
