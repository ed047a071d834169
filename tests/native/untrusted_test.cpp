// What other processes of the machine can do to a group: fd messages with too many descriptors,
// processes of other users, silent clients, unterminated strings.
#include <poll.h>
#include <signal.h>

#include <cstring>

#include "../../csrc/bootstrap/fd_server.h"
#include "../../csrc/bootstrap/unix_socket.h"
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

// Sends one fd message with `count` descriptors, which may be more than a receiver accepts.
void send_many(int socket, uint64_t number, int count) {
  std::vector<char> control(CMSG_SPACE(sizeof(int) * count));
  iovec data = {&number, sizeof number};
  msghdr header = {};
  header.msg_iov = &data, header.msg_iovlen = 1;
  header.msg_control = control.data(), header.msg_controllen = control.size();
  cmsghdr* cmsg = CMSG_FIRSTHDR(&header);
  cmsg->cmsg_level = SOL_SOCKET, cmsg->cmsg_type = SCM_RIGHTS;
  cmsg->cmsg_len = CMSG_LEN(sizeof(int) * count);
  const std::vector<int> all(count, STDERR_FILENO);
  std::memcpy(CMSG_DATA(cmsg), all.data(), sizeof(int) * count);
  expect(sendmsg(socket, &header, 0) == sizeof number, "sendmsg");
}

std::string name_of(const FdServer::FdTicket& ticket) {
  return text("pycollect-fd-server-", hexadecimal(ticket.fd_server));
}

// Impersonates an fd server: passes each client to the next of `answers`.
class FakeFdServer {
 public:
  using Answer = std::function<void(const UniqueFd& client)>;
  explicit FakeFdServer(std::vector<Answer> answers)
      : socket_(make_socket(SOCK_SEQPACKET, name_of(ticket))) {
    expect(listen(socket_.get(), 9) == 0, "listen");
    thread_ = std::jthread([this, answers = std::move(answers)] {
      for (const Answer& answer : answers)
        answer(UniqueFd(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
    });
  }
  const FdServer::FdTicket ticket{random_number(), 7};

 private:
  UniqueFd socket_;
  std::jthread thread_;
};

void closes_surplus_descriptors() {
  for (const int count : {1, 2, 3, 9}) {
    const int before = count_entries("/proc/self/fd");
    {
      const FakeFdServer fake_server({[=](const UniqueFd& client) {
        receive_fd(client.get(), 0);
        send_many(client.get(), 7, count);
      }});
      const std::string message = refusal([&] { fetch(fake_server.ticket); });
      expect(count == 1 ? message == "nothing" : contains(message, "cannot receive"), message);
    }
    expect(count_entries("/proc/self/fd") == before, text(count, " descriptors: some are left"));
  }
}

// A fetch refuses the fd server of another user, even one with the right name and number.
void rejects_fd_server_of_other_user() {
  FakeFdServer fake_server({[&](const UniqueFd& client) {
    receive_fd(client.get(), 0);
    send_fd(client.get(), 7, STDERR_FILENO);
  }});
  if (!as_another_user([&] {
        const std::string message = refusal([&] { fetch(fake_server.ticket); });
        _exit(contains(message, "is run by another user") ? 0 : 1);
      }))
    fetch(fake_server.ticket);
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

// Silent clients occupy all places of rank 0's fd server.
void exchanges_despite_silent_clients() {
  std::vector<UniqueFd> silent;
  exchange_with_changed_record([&](const std::string& record) {
    const SocketName address(name_of(PeerInfo::decode(record).ticket));
    while (silent.size() < 150) {
      silent.push_back(make_socket(SOCK_SEQPACKET));
      expect(connect(silent.back().get(), address.get(), address.bytes) == 0, "connect");
    }
    return record;
  });
}

// The fd server of rank 0 disconnects rank 1 twice before it answers, as if rank 1 were too slow.
void exchanges_after_disconnects() {
  std::optional<FakeFdServer> fake_server;
  exchange_with_changed_record([&](const std::string& record) {
    if (fake_server) return record;
    PeerInfo it = PeerInfo::decode(record);
    const FdServer::FdTicket real = it.ticket;
    const auto answer = [=](const UniqueFd& client) {
      receive_fd(client.get(), 0);
      send_fd(client.get(), 7, fetch(real).get());
    };
    const auto disconnect = [](const UniqueFd&) {};
    it.ticket =
        fake_server.emplace(std::vector<FakeFdServer::Answer>{disconnect, disconnect, answer})
            .ticket;
    return it.encode();
  });
}

// The fd server closes at any moment: a queued client then retries and is refused.
void detects_closed_fd_server() {
  for (int i = 0; i < 300; ++i) {
    const FdServer::FdTicket ticket{random_number(), 7};
    UniqueFd socket = make_socket(SOCK_SEQPACKET, name_of(ticket));
    expect(listen(socket.get(), 9) == 0, "listen");
    std::jthread owner([&] {
      pollfd polled = {socket.get(), POLLIN, 0};
      while (poll(&polled, 1, 0) == 0) continue;  // closes as soon as the client connects
      socket = UniqueFd();
    });
    const std::string message = refusal([&] { fetch(ticket, deadline_after(5s)); });
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
  const std::string message = refusal([&] { fetch(fake_server.ticket, deadline_after(200ms)); });
  const auto took = Clock::now() - begin;
  over = true;
  expect(contains(message, "does not answer"), message);
  expect(took > 150ms && took < 2s, "not at its deadline");
}

// The fd server answers despite many silent clients, and clients that send more than a request.
void answers_despite_silent_clients() {
  FdServer fd_server;
  const auto ticket = fd_server.offer(UniqueFd(dup(STDERR_FILENO)));
  const SocketName address(name_of(ticket));
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 20; ++i) {
    silent.push_back(make_socket(SOCK_SEQPACKET));
    expect(connect(silent.back().get(), address.get(), address.bytes) == 0, "connect");
  }
  const auto begin = Clock::now();
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
  expect(Clock::now() - begin < 5s, "silent clients delayed the fetch");
  const int before = count_entries("/proc/self/fd");
  send_many(silent.front().get(), ticket.number, 2);
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
  expect(count_entries("/proc/self/fd") <= before, "descriptors of a stranger are left");
}

void refuses_other_users() {
  FdServer fd_server;
  const auto ticket = fd_server.offer(UniqueFd(dup(STDERR_FILENO)));
  as_another_user([&] { _exit(refusal([&] { fetch(ticket); }) == "nothing" ? 1 : 0); });
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
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
  answers_despite_silent_clients();
  refuses_other_users();
  reads_unterminated_strings_within_bounds();
  names_unknown_values_by_number();
  std::puts("untrusted_test: all good");
}
