// What other processes of the machine can do to a group: fd messages with too many descriptors,
// processes of other users, silent clients, forked children, unterminated strings.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
#include <cstring>

#include "../../csrc/bootstrap/fd_server.h"
#include "../../csrc/group/abort_state.h"
#include "../../csrc/rank_executor/agreement.h"
#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

constexpr uid_t kNobody = 65534;

// Runs `body` in a child that has switched to another user; returns false where that is forbidden.
bool as_another_user(const std::function<void()>& body) {
  if (geteuid() != 0) {
    std::puts("  SKIPPED: no right to become another user");
    return false;
  }
  const pid_t pid = fork();
  if (pid == 0) {
    if (setresuid(kNobody, kNobody, kNobody) != 0) _exit(2);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  expect(status == 0, text("as another user: ", WEXITSTATUS(status)));
  return true;
}

// Sends `count` descriptors: an fd server's answer if it is one. Returns false on failure, as when
// the other end has disconnected.
bool send_many(const UniqueFd& client, int count, int descriptor = STDERR_FILENO) {
  std::vector<char> control(CMSG_SPACE(sizeof(int) * count));
  char why = 0;  // none: granted
  iovec data = {&why, sizeof why};
  msghdr header = {};
  header.msg_iov = &data, header.msg_iovlen = 1;
  header.msg_control = control.data(), header.msg_controllen = control.size();
  cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
  cmsg->cmsg_level = SOL_SOCKET, cmsg->cmsg_type = SCM_RIGHTS;
  cmsg->cmsg_len = CMSG_LEN(sizeof(int) * count);
  const std::vector<int> all(count, descriptor);
  std::memcpy(CMSG_DATA(cmsg), all.data(), sizeof(int) * count);
  return sendmsg(client.get(), &header, MSG_NOSIGNAL) >= 0;
}

// Returns a socket that `connect_or_bind` has connected or bound to the address of an fd server.
UniqueFd server_socket(uint64_t id, int (*connect_or_bind)(int, const sockaddr*, socklen_t)) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const std::string name = fd_server_name(id);
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  name.copy(address.sun_path + 1, name.size());
  expect(connect_or_bind(socket.get(), reinterpret_cast<const sockaddr*>(&address),
                         offsetof(sockaddr_un, sun_path) + 1 + name.size()) == 0,
         "a socket of an fd server");
  return socket;
}

UniqueFd listener(uint64_t id) {
  UniqueFd socket = server_socket(id, bind);
  expect(listen(socket.get(), 9) == 0, "listen");
  return socket;
}

UniqueFd fetch_from(uint64_t id) { return fetch(id, deadline_after(10s)); }

// Impersonates an fd server: passes each client to the next of `answers`.
class FakeFdServer {
 public:
  using Answer = std::function<void(const UniqueFd& client)>;
  explicit FakeFdServer(std::vector<Answer> answers) : socket_(listener(id)) {
    thread_ = std::jthread([this, answers = std::move(answers)] {
      for (const Answer& answer : answers)
        answer(UniqueFd(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
    });
  }
  const uint64_t id = random_number();

 private:
  UniqueFd socket_;
  std::jthread thread_;
};

void closes_surplus_descriptors() {
  for (const int count : {1, 2, 3, 9}) {
    const int before = count_entries("/proc/self/fd");
    {
      const FakeFdServer fake_server(
          {[=](const UniqueFd& client) { expect(send_many(client, count), "sendmsg"); }});
      const std::string message = refusal([&] { fetch_from(fake_server.id); });
      expect(count == 1 ? message == "nothing" : contains(message, "cannot receive"), message);
    }
    expect(count_entries("/proc/self/fd") == before, text(count, " descriptors: some are left"));
  }
}

// A fetch refuses the fd server of another user, even one with the right id.
void rejects_fd_server_of_other_user() {
  FakeFdServer fake_server({[&](const UniqueFd& client) { send_many(client, 1); }});
  if (!as_another_user([&] {
        const std::string message = refusal([&] { fetch_from(fake_server.id); });
        _exit(contains(message, "is run by another user") ? 0 : 1);
      }))
    fetch_from(fake_server.id);
}

// Runs a group of two ranks, of which rank 1 reads rank 0's PeerInfo through `change`.
void exchange_with_changed_record(
    const std::function<std::string(const std::string& record)>& change) {
  const auto ends = run(2, quick_settings(), [&](RankContext& me) {
    FaultyStore store(me.store, {}, [&](const std::string& key, const std::string& value) {
      return me.rank == 1 && key == "hello/0" ? change(value) : value;
    });
    Group group(store, me.rank, me.world, me.settings);
    return std::string("right");
  });
  for (const RankExit& end : ends) {
    expect_equal(end.result, "right");
    expect(end.elapsed < 10s, "took too long");
  }
}

// Many clients of rank 0's fd server never read.
void exchanges_despite_silent_clients() {
  std::vector<UniqueFd> silent;
  exchange_with_changed_record([&](const std::string& record) {
    while (silent.size() < 150)
      silent.push_back(server_socket(PeerInfo::decode(record).fd_server, connect));
    return record;
  });
}

// The fd server of rank 0 disconnects rank 1 twice before it answers, as if it could not send.
void exchanges_after_disconnects() {
  std::optional<FakeFdServer> fake_server;
  exchange_with_changed_record([&](const std::string& record) {
    if (fake_server) return record;
    PeerInfo it = PeerInfo::decode(record);
    const auto answer = [real = it.fd_server](const UniqueFd& client) {
      send_many(client, 1, fetch_from(real).get());
    };
    const auto disconnect = [](const UniqueFd&) {};
    it.fd_server =
        fake_server.emplace(std::vector<FakeFdServer::Answer>{disconnect, disconnect, answer}).id;
    return it.encode();
  });
}

// The fd server closes at any moment: a queued client then retries and is refused.
void detects_closed_fd_server() {
  for (int i = 0; i < 300; ++i) {
    const uint64_t id = random_number();
    UniqueFd socket = listener(id);
    std::jthread owner([&] {
      pollfd polled = {socket.get(), POLLIN, 0};
      while (poll(&polled, 1, 0) == 0) continue;  // closes as soon as the client connects
      socket = UniqueFd();
    });
    const std::string message = refusal([&] { fetch(id, deadline_after(5s)); });
    expect(contains(message, "cannot reach") && contains(message, "Connection refused"), message);
  }
}

// The fd server does not answer, while a profiler's signals keep interrupting the wait for it.
void keeps_deadline_despite_signals() {
  std::atomic<bool> over{false};
  const FakeFdServer fake_server({[&](const UniqueFd&) {
    for (const auto begin = Clock::now(); !over && Clock::now() - begin < 5s;)
      std::this_thread::sleep_for(1ms);
  }});
  struct sigaction act = {};
  act.sa_handler = [](int) {};
  sigaction(SIGUSR1, &act, nullptr);
  std::jthread profiler([&, fetching_thread = pthread_self()] {
    for (; !over; std::this_thread::sleep_for(2ms)) pthread_kill(fetching_thread, SIGUSR1);
  });
  const auto begin = Clock::now();
  const std::string message = refusal([&] { fetch(fake_server.id, deadline_after(200ms)); });
  const auto took = Clock::now() - begin;
  over = true;
  expect(contains(message, "does not answer"), message);
  expect(took > 150ms && took < 2s, "not at its deadline");
}

UniqueFd copy_of_stderr() { return UniqueFd(dup(STDERR_FILENO)); }

// Clients in many threads, beside others that never read or that send something.
void answers_all_clients() {
  const UniqueFd file(memfd_create("offered", MFD_CLOEXEC));
  const int before = count_entries("/proc/self/fd");
  {
    std::vector<UniqueFd> strangers;
    const FdServer fd_server(UniqueFd(dup(file.get())));
    for (int i = 0; i < 20; ++i) {
      strangers.push_back(server_socket(fd_server.id(), connect));
      if (i % 2 == 0) send_many(strangers.back(), 2);
    }
    std::vector<std::jthread> clients;
    for (int i = 0; i < 16; ++i)
      clients.emplace_back([&] {
        for (int n = 0; n < 10; ++n) {
          const UniqueFd fetched = fetch_from(fd_server.id());
          struct stat one = {}, other = {};
          expect(fstat(file.get(), &one) == 0 && fstat(fetched.get(), &other) == 0, "fstat");
          expect(one.st_ino == other.st_ino, "another file");
          expect((fcntl(fetched.get(), F_GETFD) & FD_CLOEXEC) != 0, "inherited by programs");
        }
      });
  }
  expect(count_entries("/proc/self/fd") == before, "descriptors are left");
}

// The server ends while clients fetch: each of them is then refused at once.
void ends_while_clients_fetch() {
  for (int i = 0; i < 50; ++i) {
    std::optional<FdServer> fd_server(std::in_place, copy_of_stderr());
    const uint64_t id = fd_server->id();
    std::atomic<int> fetched{0};
    std::vector<std::jthread> clients;
    for (int n = 0; n < 3; ++n)
      clients.emplace_back([&] {
        const std::string message = refusal([&] {
          for (;; ++fetched) fetch_from(id);
        });
        expect(contains(message, "Connection refused"), message);
      });
    while (fetched < 3 * i % 20) std::this_thread::yield();
    fd_server.reset();
    const auto end = Clock::now();
    clients.clear();
    expect(Clock::now() - end < 2s, "clients were refused late");
  }
}

// From now on, this process may open descriptors only below `limit`.
void limit_descriptors(rlim_t limit) {
  rlimit both = {};
  getrlimit(RLIMIT_NOFILE, &both);
  both.rlim_cur = limit;
  expect(setrlimit(RLIMIT_NOFILE, &both) == 0, "setrlimit");
}

// Returns the exit status of a child that runs `body`.
int status_of_child(const std::function<bool()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body() ? 0 : 1);
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

void names_too_many_open_files() {
  const FdServer fd_server(copy_of_stderr());
  for (const int free : {0, 1}) {  // no room for the socket; for the socket, not the descriptor
    const std::string why = free == 0 ? "cannot make a Unix socket: " : "cannot receive the ";
    expect(status_of_child([&] {
             limit_descriptors(copy_of_stderr().get() + free);  // the lowest number that is free
             const std::string message = refusal([&] { fetch_from(fd_server.id()); });
             return contains(message, why) && contains(message, "Too many open files");
           }) == 0,
           why);
  }
}

// A server without room for the connection of a client answers once it has some, and ends without.
void waits_for_a_free_descriptor() {
  const int status = status_of_child([] {
    std::optional<FdServer> fd_server(std::in_place, copy_of_stderr());
    const uint64_t id = fd_server->id();
    std::array<int, 2> begun = {};
    char byte = 0;
    expect(pipe(begun.data()) == 0, "pipe");
    rlimit before = {};
    getrlimit(RLIMIT_NOFILE, &before);
    const pid_t client = fork();
    if (client == 0) {
      ::write(begun[1], "!", 1);
      _exit(refusal([&] { fetch_from(id); }) == "nothing" ? 0 : 1);
    }
    limit_descriptors(1);  // too few for `poll`, too
    expect(::read(begun[0], &byte, 1) == 1, "read");
    std::this_thread::sleep_for(100ms);
    limit_descriptors(before.rlim_cur);
    int fetched = 1;
    waitpid(client, &fetched, 0);
    const pid_t stranger = fork();
    if (stranger == 0) {
      expect(::read(begun[0], &byte, 1) == 1, "read");
      server_socket(id, connect);
      _exit(0);
    }
    limit_descriptors(1);
    ::write(begun[1], "!", 1);
    waitpid(stranger, nullptr, 0);
    std::this_thread::sleep_for(30ms);
    fd_server.reset();
    return fetched == 0;
  });
  expect(status == 0, "the client was refused");
}

// A forked child, such as a DataLoader's worker, may live for long. It keeps nothing open, and can
// fetch.
void leaves_nothing_in_forked_children() {
  std::array<int, 2> ends = {}, offered = {};  // of parent and child; to read and to write
  expect(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0 &&
             pipe2(offered.data(), O_NONBLOCK) == 0,
         "pipes");
  std::optional<FdServer> fd_server(std::in_place, UniqueFd(offered[1]));
  const FdServer other(copy_of_stderr());
  char byte = 0;
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]), expect(static_cast<bool>(fetch_from(fd_server->id())), "nothing was fetched");
    ::write(ends[1], "!", 1);
    _exit(static_cast<int>(::read(ends[1], &byte, 1)));  // it waits for the parent's end
  }
  close(ends[1]);
  expect(::read(ends[0], &byte, 1) == 1, "the child failed");
  const uint64_t id = fd_server->id();
  expect(static_cast<bool>(fetch_from(id)), "nothing was fetched");
  expect(static_cast<bool>(fetch_from(other.id())), "nothing was fetched from the other server");
  expect(::read(offered[0], &byte, 1) < 0 && errno == EAGAIN, "the server holds nothing");
  fd_server.reset();
  expect(::read(offered[0], &byte, 1) == 0, "the child holds the offered file");
  const auto begin = Clock::now();
  expect(contains(refusal([&] { fetch_from(id); }), "Connection refused"), "a server is left");
  expect(Clock::now() - begin < 2s, "refused late");
  close(ends[0]), close(offered[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  expect(status == 0, text("the child ended with ", status));
}

// By itself, whatever the client checks.
void refuses_other_users() {
  const FdServer fd_server(copy_of_stderr());
  as_another_user([&] {
    const UniqueFd client = server_socket(fd_server.id(), connect);
    unsigned char why = 0;
    alignas(cmsghdr) std::array<char, 256> control = {};
    iovec data = {&why, sizeof why};
    msghdr header = {};
    header.msg_iov = &data, header.msg_iovlen = 1;
    header.msg_control = control.data(), header.msg_controllen = control.size();
    const auto got = recvmsg(client.get(), &header, 0);
    _exit(got == 1 && why != 0 && header.msg_controllen == 0 ? 0 : 1);
  });
  expect(static_cast<bool>(fetch_from(fd_server.id())), "nothing was fetched");
}

// A process of another user sends sockets that take long to close: neither clients nor forks wait.
void closes_no_sockets_of_strangers() {
  const FdServer fd_server(copy_of_stderr());
  constexpr int kPassRights = 83;  // SO_PASSRIGHTS
  int passes = 1;
  socklen_t bytes = sizeof passes;
  if (getsockopt(UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET, 0)).get(), SOL_SOCKET, kPassRights,
                 &passes, &bytes) != 0)
    return void(std::puts("  SKIPPED: this kernel cannot forbid to send descriptors"));
  as_another_user([&] {
    for (int i = 0; i < 1000; ++i) {
      const UniqueFd client = server_socket(fd_server.id(), connect);
      if (send_many(client, 1)) _exit(1);
    }
  });
}

// Strings of a rank without a terminator, before memory that is not zero.
void reads_unterminated_strings_within_bounds() {
  GroupSettings settings = quick_settings();
  MapStore store;
  Group group(store, 0, 1, settings);
  const CallFingerprint refused{.call = 1, .fingerprint = {.flags = Fingerprint::refused}};
  publish_refusal(group, refused, "why");
  FingerprintDetails& d = group.fingerprint_details(0, 1);
  d.refusal.fill('x');
  std::memset(static_cast<void*>(&d + 1), 'x', 2 * sizeof(uint64_t));
  const std::string message =
      refusal([&] { agree(group, refused, 1, {"all_reduce", 1, Clock::now()}); });
  expect_equal(message, "invalid_argument: rank 0 refused " + std::string(d.refusal.size(), 'x'));

  struct {
    AbortRecord record;
    std::array<char, 64> behind;
  } memory;
  memory.record.operation.fill('o'), memory.record.cause.fill('c'), memory.behind.fill('b');
  memory.record.state = AbortRecord::lost;
  const AbortState abort_state(memory.record, "g");
  const std::string cause = refusal([&] { abort_state.rethrow({"send", 3, Clock::now()}); });
  expect_equal(cause, "PeerLost: send #3 of group 'g': broken since " + std::string(48, 'o') +
                          " #0: " + std::string(512, 'c'));
}

// A rank publishes numbers of collectives, dtypes and operations that do not exist.
void names_unknown_values_by_number() {
  const auto ends = run(2, quick_settings(), [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    const CallFingerprint mine{
        .call = 1, .fingerprint = {.fingerprint_hash = 1 + static_cast<uint64_t>(me.rank)}};
    const CollectiveRequest request{.collective = Collective::all_reduce};
    publish(group, mine, &request);
    FingerprintDetails& d = group.fingerprint_details(me.rank, 1);
    d.collective = me.rank == 0 ? 0 : 200, d.dtype = 201, d.op = 202;
    group.advance(at_run(1) + 1);
    return refusal([&] { agree(group, mine, 1, me.context(10s)); });
  });
  for (const RankExit& end : ends)
    expect_equal(end.result,
                 "invalid_argument: all ranks of a group must make the same call: rank 1 called "
                 "number 200 of 0 number 201, rank 0 called all_reduce of 0 number 201, op number "
                 "202");
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  closes_surplus_descriptors();
  rejects_fd_server_of_other_user();
  exchanges_despite_silent_clients();
  exchanges_after_disconnects();
  detects_closed_fd_server();
  keeps_deadline_despite_signals();
  answers_all_clients();
  ends_while_clients_fetch();
  names_too_many_open_files();
  waits_for_a_free_descriptor();
  leaves_nothing_in_forked_children();
  refuses_other_users();
  closes_no_sockets_of_strangers();
  reads_unterminated_strings_within_bounds();
  names_unknown_values_by_number();
  std::puts("untrusted_test: all good");
}
