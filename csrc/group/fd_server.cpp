#include "fd_server.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

#include "../plan/error.h"

namespace pycollect::ipc {

namespace {

// Maximum number of clients that wait for the server thread, twice the ranks of the largest group.
// Others wait in `connect`.
constexpr int kMostClients = 128;
// Delay before a client that got no answer tries again.
constexpr std::chrono::milliseconds kRetryDelay{5};
// Delay before the server goes on after an error, such as that it has run out of descriptors.
constexpr std::chrono::milliseconds kErrorDelay{10};
// A client looks at the clock this often.
constexpr timeval kClientInterval = {.tv_sec = 0, .tv_usec = 50'000};

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

// The sockets of servers. Forked children close them: otherwise they would exist as long as the
// child lives, and clients would wait for answers of a parent that has exited.
struct ServerSockets {
  std::mutex mutex;  // held while one is opened or closed
  std::set<int> all;
};
ServerSockets& server_sockets() {
  static ServerSockets& sockets = *new ServerSockets;
  [[maybe_unused]] static const int registered =
      pthread_atfork([] { sockets.mutex.lock(); }, [] { sockets.mutex.unlock(); },
                     [] {
                       for (const int socket : sockets.all) close(socket);
                       sockets.all.clear();
                       sockets.mutex.unlock();
                     });
  return sockets;
}

UniqueFd make_listener(uint64_t id) {
  UniqueFd socket = make_socket(SOCK_NONBLOCK);
  // Clients may not send descriptors (since Linux 6.16, which defines SO_PASSRIGHTS): to close one
  // can take as long as its sender likes, as of a TCP socket that lingers.
  constexpr int kPassRights = 83, kNo = 0;
  setsockopt(socket.get(), SOL_SOCKET, kPassRights, &kNo, sizeof kNo);
  const ServerAddress address(id);
  if (bind(socket.get(), address.get(), address.bytes) != 0)
    refuse("cannot bind a Unix socket", errno);
  if (listen(socket.get(), kMostClients) != 0) refuse("cannot listen on a Unix socket", errno);
  return socket;
}

// Returns true if the other end of a connection is a process of the same user or, with `or_root`,
// of root.
bool is_of_own_user(const UniqueFd& connection, bool or_root) {
  ucred other = {};
  socklen_t bytes = sizeof other;
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &other, &bytes) != 0) return false;
  return other.uid == geteuid() || other.uid == getuid() || (or_root && other.uid == 0);
}

// An answer of the server: the descriptor, or why there is none.
struct FdMessage {
  static constexpr uint8_t kNotAdmitted = 255;  // the client's user
  uint8_t why;                                  // kNotAdmitted, an errno value, or 0
  iovec data = {&why, sizeof why};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  explicit FdMessage(uint8_t reason = 0) : why(reason) {
    header.msg_iov = &data, header.msg_iovlen = 1;
    header.msg_control = control.data(), header.msg_controllen = control.size();
  }
  FdMessage(const FdMessage&) = delete;
  FdMessage& operator=(const FdMessage&) = delete;

  // Returns an errno value, or 0. Sends no descriptor if it is negative.
  int try_send(const UniqueFd& client, int descriptor) {
    cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(cmsg), &descriptor, sizeof descriptor);
    if (descriptor < 0) header.msg_control = nullptr, header.msg_controllen = 0;
    while (sendmsg(client.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
      if (errno != EINTR) return errno;
    return 0;
  }
  // Returns the received descriptor, if there is one.
  UniqueFd take_descriptor() {
    const cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
    int fd = -1;
    if (cmsg != nullptr && cmsg->cmsg_type == SCM_RIGHTS)
      std::memcpy(&fd, CMSG_DATA(cmsg), sizeof fd);
    return UniqueFd(fd);
  }
};

// Answers the next client. Returns false after an error that would recur at once, as when this
// process has run out of descriptors.
bool answer_client(const UniqueFd& listener, int offered) {
  UniqueFd client;  // closed without the lock: that can take long if the client has sent sockets
  const std::lock_guard lock(server_sockets().mutex);
  client = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client) return errno == EINTR || errno == EAGAIN || errno == ECONNABORTED;
  const int error = is_of_own_user(client, true) ? FdMessage().try_send(client, offered)
                                                 : FdMessage::kNotAdmitted;
  // A client that has disconnected gets no answer, and needs none.
  if (error != 0) FdMessage(static_cast<uint8_t>(error)).try_send(client, -1);
  return true;
}

// Repeats a system call that ends early: when a signal arrives (a profiler's arrive every few
// milliseconds), and after kClientInterval. Returns its result; the error after the deadline is
// EAGAIN.
template <class Call>
auto repeat_until(Deadline deadline, const Call& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || (errno != EINTR && errno != EAGAIN)) return result;
    if (Clock::now() < deadline) continue;
    errno = EAGAIN;
    return result;
  }
}

// Connects to an fd server of this user, or of any if this process is root's.
UniqueFd connect_to(uint64_t id, Deadline deadline) {
  const ServerAddress address(id);
  UniqueFd socket = make_socket(0);
  for (const int what : {SO_SNDTIMEO, SO_RCVTIMEO})  // of `connect` and `recvmsg`
    if (setsockopt(socket.get(), SOL_SOCKET, what, &kClientInterval, sizeof kClientInterval) != 0)
      refuse("cannot limit the time of a Unix socket", errno);
  const auto connects = [&] { return connect(socket.get(), address.get(), address.bytes); };
  if (repeat_until(deadline, connects) != 0) {
    const int why = errno;
    refuse(
        text("cannot reach the Unix socket @", fd_server_name(id), " of the process that offers ",
             "the descriptor, which must be alive and in the same network namespace"),
        why);
  }
  if (!is_of_own_user(socket, false) && geteuid() != 0)
    throw std::runtime_error(
        "the process that offers the descriptor is run by another user; only its own user and "
        "root are admitted");
  return socket;
}

}  // namespace

std::string fd_server_name(uint64_t id) { return text("pycollect-fd-server-", id); }

FdServer::FdServer(int descriptor)
    : id_(random_number()), end_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!end_) refuse("cannot make an eventfd", errno);
  const auto serve = [this, descriptor] {
    pthread_setname_np(pthread_self(), "pycollect fds");
    for (;;) {
      std::array<pollfd, 2> polled = {pollfd{end_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      const bool polls = poll(polled.data(), polled.size(), -1) >= 0;
      if (eventfd_t ends = 0; eventfd_read(end_.get(), &ends) == 0) return;
      if (!polls || !answer_client(listener_, descriptor)) std::this_thread::sleep_for(kErrorDelay);
    }
  };
  const std::lock_guard lock(server_sockets().mutex);
  listener_ = make_listener(id_);
  thread_ = std::make_unique<std::thread>(new_thread_without_signals(serve));
  server_sockets().all.insert(listener_.get());
}

FdServer::~FdServer() {
  if (fork_guard_.forked()) {
    static_cast<void>(thread_.release());  // the thread exists only in the parent process
    listener_.release();                   // was closed when the child was forked
    return;
  }
  eventfd_write(end_.get(), 1);
  thread_->join();
  const std::lock_guard lock(server_sockets().mutex);
  server_sockets().all.erase(listener_.get());
  listener_ = UniqueFd();
}

UniqueFd fetch(uint64_t id, Deadline deadline) {
  for (;; std::this_thread::sleep_for(kRetryDelay)) {
    const UniqueFd socket = connect_to(id, deadline);
    FdMessage answer;
    const auto receive = [&] { return recvmsg(socket.get(), &answer.header, MSG_CMSG_CLOEXEC); };
    const auto got = repeat_until(deadline, receive);
    if (got <= 0) {
      const int why = got == 0 ? ECONNRESET : errno;
      // The server has just ended, and the next `connect` fails.
      if (why == ECONNRESET && Clock::now() < deadline) continue;
      refuse("the process that offers the descriptor does not answer",
             why == ECONNRESET ? EAGAIN : why);
    }
    UniqueFd descriptor = answer.take_descriptor();
    if (descriptor) return descriptor;
    if (answer.why == FdMessage::kNotAdmitted)
      throw std::runtime_error("the process that offers the descriptor does not admit this user");
    if (answer.why != 0)
      refuse("the process that offers the descriptor cannot send it", answer.why);
    if (!UniqueFd(dup(socket.get()))) refuse("cannot receive the descriptor", errno);
    throw std::runtime_error("cannot receive the descriptor: a security policy forbids it");
  }
}

}  // namespace pycollect::ipc
