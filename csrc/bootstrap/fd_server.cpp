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
// Delay before the server goes on after an error, such as that it has run out of descriptors.
constexpr std::chrono::milliseconds kErrorDelay{10};

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

// Returns an eventfd that ends the server when it is readable: shutting the socket down does not
// wake `poll` on every kernel.
UniqueFd make_end_event() {
  UniqueFd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
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

// An answer of the server: the descriptor, or why there is none.
struct FdMessage {
  static constexpr uint8_t kNotAdmitted = 255;  // the client's user
  uint8_t why = 0;                              // kNotAdmitted, an errno value, or 0
  iovec data = {&why, sizeof why};
  // `control` is sized for one descriptor; its padding makes room for a second one.
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr header = {};
  FdMessage() {
    header.msg_iov = &data, header.msg_iovlen = 1;
    header.msg_control = control.data(), header.msg_controllen = control.size();
  }
  FdMessage(const FdMessage&) = delete;
  FdMessage& operator=(const FdMessage&) = delete;

  // A client that has disconnected gets no answer, and needs none.
  void send(const UniqueFd& client, int descriptor) {
    cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(cmsg), &descriptor, sizeof descriptor);
    if (const int error = try_send(client)) refuse_client(client, static_cast<uint8_t>(error));
  }
  void refuse_client(const UniqueFd& client, uint8_t reason) {
    why = reason;
    header.msg_control = nullptr, header.msg_controllen = 0;
    try_send(client);
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

 private:
  int try_send(const UniqueFd& client) {  // returns an errno value, or 0
    while (sendmsg(client.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
      if (errno != EINTR) return errno;
    return 0;
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
// with the time limit reduced to the time until the deadline. Returns its result; the error after
// the deadline is EAGAIN.
template <class Call>
auto retry_until(const UniqueFd& socket, Deadline deadline, const Call& call) {
  for (;;) {
    set_time_limit(socket.get(), deadline);
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
    if (Clock::now() < deadline) continue;
    errno = EAGAIN;
    return result;
  }
}

// Connects to an fd server of this user, or of any if this process is root's.
UniqueFd connect_to(uint64_t id, Deadline deadline) {
  const ServerAddress address(id);
  UniqueFd socket = make_socket(0);
  const auto connects = [&] { return connect(socket.get(), address.get(), address.bytes); };
  if (retry_until(socket, deadline, connects) != 0) {
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

// The descriptors of a server. A forked child closes them: otherwise the socket would exist as long
// as the child lives, and clients would wait for answers of a parent that has exited.
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

  // Answers the next client. Returns false after an error that would recur at once, as when this
  // process has run out of descriptors.
  bool answer() {
    UniqueFd client;  // closed without the lock: that can take long if the client has sent sockets
    const std::lock_guard lock(mutex);
    client = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!client) return errno == EINTR || errno == EAGAIN || errno == ECONNABORTED;
    if (is_of_own_user(client, true))
      FdMessage().send(client, offered.get());
    else
      FdMessage().refuse_client(client, FdMessage::kNotAdmitted);
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
    const bool polls = poll(polled.data(), polled.size(), -1) >= 0;
    if (eventfd_t ends = 0; eventfd_read(end_.get(), &ends) == 0) return;
    if (!polls || !open_->answer()) std::this_thread::sleep_for(kErrorDelay);
  }
}

UniqueFd fetch(uint64_t id, Deadline deadline) {
  for (;; std::this_thread::sleep_for(kRetryDelay)) {
    const UniqueFd socket = connect_to(id, deadline);
    FdMessage answer;
    const auto got = retry_until(
        socket, deadline, [&] { return recvmsg(socket.get(), &answer.header, MSG_CMSG_CLOEXEC); });
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
    throw std::runtime_error(
        "cannot receive the descriptor: a security policy forbids it, or the answer is invalid");
  }
}

}  // namespace pycollect::ipc
