// The fd server and its clients: what processes of this and other users, forked children, signals
// and a lack of descriptors can do to them.
#include "../../csrc/group/fd_server.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
#include <optional>

#include "ranks.h"

namespace pycollect::ipc {
namespace {

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

UniqueFd fetch_from(uint64_t id) { return fetch(id, deadline_after(10s)); }
std::string refused(uint64_t id) {
  return refusal([&] { fetch_from(id); });
}

// The fd server does not answer, while a profiler's signals keep interrupting the wait for it.
void keeps_deadline_despite_signals() {
  struct sigaction act = {};
  act.sa_handler = [](int) {};
  sigaction(SIGUSR1, &act, nullptr);
  const uint64_t id = random_number();
  const UniqueFd silent = server_socket(id, bind);
  expect(listen(silent.get(), 9) == 0, "listen");
  std::jthread profiler([me = pthread_self()](const std::stop_token& over) {
    for (; !over.stop_requested(); std::this_thread::sleep_for(2ms)) pthread_kill(me, SIGUSR1);
  });
  const auto begin = Clock::now();
  expect_part(refusal([&] { fetch(id, deadline_after(200ms)); }), "does not answer");
  const auto took = Clock::now() - begin;
  expect(took > 150ms && took < 2s, "not at its deadline");
}

// Many threads fetch, beside strangers that never read, until the server ends at any moment: a
// client that is disconnected tries again, and is refused at once.
void answers_all_clients() {
  const int before = count_entries("/proc/self/fd");
  for (int i = 0; i < 30; ++i) {
    std::optional<FdServer> fd_server(std::in_place, STDERR_FILENO);
    const uint64_t id = fd_server->id();
    std::vector<UniqueFd> strangers;
    while (i == 0 && strangers.size() < 150) strangers.push_back(server_socket(id, connect));
    std::atomic<int> fetched{0};
    std::vector<std::jthread> clients;
    for (int n = 0; n < 8; ++n)
      clients.emplace_back([&] {
        const std::string message = refusal([&] {
          for (;; ++fetched)
            expect((fcntl(fetch_from(id).get(), F_GETFD) & FD_CLOEXEC) != 0, "is inherited");
        });
        expect_part(message, "Connection refused");
      });
    while (fetched < 7 * i % 100) std::this_thread::yield();
    fd_server.reset();
    const auto end = Clock::now();
    clients.clear();
    expect(Clock::now() - end < 2s, "clients were refused late");
  }
  expect(count_entries("/proc/self/fd") == before, "descriptors are left");
}

// From now on, this process may open descriptors only below `limit`. Returns the limit before.
rlim_t limit_descriptors(rlim_t limit) {
  rlimit both = {};
  getrlimit(RLIMIT_NOFILE, &both);
  std::swap(both.rlim_cur, limit);
  expect(setrlimit(RLIMIT_NOFILE, &both) == 0, "setrlimit");
  return limit;
}

void names_too_many_open_files() {
  const FdServer fd_server(STDERR_FILENO);
  for (const int free : {0, 1})  // no room for the socket; for the socket, not the descriptor
    expect_in_child([&] {
      limit_descriptors(UniqueFd(dup(STDERR_FILENO)).get() +
                        free);  // the lowest number that is free
      const std::string message = refused(fd_server.id());
      expect_part(message, free == 0 ? "cannot make a Unix socket: " : "cannot receive the ");
      expect_part(message, "Too many open files");
    });
}

// A server without room for the connection of a client answers once it has some, and ends without.
void waits_for_a_free_descriptor() {
  expect_in_child([] {
    std::optional<FdServer> fd_server(std::in_place, STDERR_FILENO);
    std::jthread server_lacks_descriptors([&] {
      const rlim_t before = limit_descriptors(1);  // too few for `poll`, too
      std::this_thread::sleep_for(150ms);
      limit_descriptors(before);
    });
    expect_in_child([id = fd_server->id()] {
      std::this_thread::sleep_for(50ms);
      limit_descriptors(100);
      expect_equal(refused(id), "nothing");
    });
    server_lacks_descriptors.join();
    limit_descriptors(1);
    fd_server.reset();
  });
}

// A forked child, such as a DataLoader's worker, may live for long. It keeps no socket of a server
// open, and can fetch.
void leaves_nothing_in_forked_children() {
  std::array<int, 2> ready = {};  // a pipe
  expect(pipe(ready.data()) == 0, "pipe");
  std::optional<FdServer> fd_server(std::in_place, STDERR_FILENO);
  const FdServer other(STDERR_FILENO);
  const uint64_t id = fd_server->id();
  char byte = 0;
  const pid_t child = fork();
  if (child == 0) {
    expect_equal(refused(id), "nothing");
    expect(::write(ready[1], "!", 1) == 1, "write");
    for (alarm(60);;) ::pause();
  }
  expect(::read(ready[0], &byte, 1) == 1, "the child failed");
  expect_equal(refused(id), "nothing");
  expect_equal(refused(other.id()), "nothing");
  fd_server.reset();
  const auto begin = Clock::now();
  expect_part(refused(id), "Connection refused");
  expect(Clock::now() - begin < 2s, "refused late");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// The server itself refuses other users, whatever the client checks.
void refuses_other_users() {
  const FdServer fd_server(STDERR_FILENO);
  if (geteuid() != 0) return void(std::puts("  SKIPPED: no right to become another user"));
  expect_in_child([&] {
    constexpr uid_t kNobody = 65534;
    expect(setresuid(kNobody, kNobody, kNobody) == 0, "cannot become another user");
    char why = 0;  // stays 0 if a descriptor comes
    expect(recv(server_socket(fd_server.id(), connect).get(), &why, 1, 0) == 1 && why != 0,
           "was not refused");
  });
  expect_equal(refused(fd_server.id()), "nothing");
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  pycollect::run_tests({{"keeps deadline despite signals", keeps_deadline_despite_signals},
                        {"answers all clients", answers_all_clients},
                        {"names too many open files", names_too_many_open_files},
                        {"waits for a free descriptor", waits_for_a_free_descriptor},
                        {"leaves nothing in forked children", leaves_nothing_in_forked_children},
                        {"refuses other users", refuses_other_users}});
}
