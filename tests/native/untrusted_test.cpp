// What other processes of the machine can do to a group: fd messages with too many descriptors,
// processes of other users, silent callers, unterminated strings.
#include <poll.h>
#include <signal.h>

#include <cstring>

#include "../../csrc/bootstrap/fd_server.h"
#include "../../csrc/bootstrap/unix_socket.h"
#include "../../csrc/shm/abort_state.h"
#include "../../csrc/transport/agreement.h"
#include "group_ranks.h"

namespace pycollect::shm {
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
  cmsghdr* with = CMSG_FIRSTHDR(&header);
  with->cmsg_level = SOL_SOCKET, with->cmsg_type = SCM_RIGHTS;
  with->cmsg_len = CMSG_LEN(sizeof(int) * count);
  const std::vector<int> all(count, STDERR_FILENO);
  std::memcpy(CMSG_DATA(with), all.data(), sizeof(int) * count);
  expect(sendmsg(socket, &header, 0) == sizeof number, "sendmsg");
}

std::string name_of(const FdServer::FdTicket& ticket) {
  return text("pycollect-fd-server-", hexadecimal(ticket.fd_server));
}

// Takes the place of an fd server, for as many callers as there are `replies`.
class FakeFdServer {
 public:
  using Answer = std::function<void(const Descriptor& caller)>;
  explicit FakeFdServer(std::vector<Answer> replies)
      : socket_(make_socket(SOCK_SEQPACKET, name_of(ticket))) {
    expect(listen(socket_.get(), 9) == 0, "listen");
    thread_ = std::jthread([this, replies = std::move(replies)] {
      for (const Answer& answer : replies)
        answer(Descriptor(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
    });
  }
  const FdServer::FdTicket ticket{random_number(), 7};

 private:
  Descriptor socket_;
  std::jthread thread_;
};

void keeps_no_descriptor_of_several() {
  for (const int count : {1, 2, 3, 9}) {
    const int before = count_entries("/proc/self/fd");
    {
      const FakeFdServer pretender({[=](const Descriptor& caller) {
        receive_fd(caller.get(), 0);
        send_many(caller.get(), 7, count);
      }});
      const std::string said = refusal([&] { fetch(pretender.ticket); });
      expect(count == 1 ? said == "nothing" : contains(said, "cannot receive"), said);
    }
    expect(count_entries("/proc/self/fd") == before, text(count, " descriptors: some are left"));
  }
}

// A fetch refuses the fd server of another user, even one with the right name and number.
void takes_nothing_from_other_users() {
  FakeFdServer pretender({[&](const Descriptor& caller) {
    receive_fd(caller.get(), 0);
    send_fd(caller.get(), 7, STDERR_FILENO);
  }});
  if (!as_another_user([&] {
        const std::string said = refusal([&] { fetch(pretender.ticket); });
        _exit(contains(said, "is run by another user") ? 0 : 1);
      }))
    fetch(pretender.ticket);
}

// A group of two whose rank 1 reads rank 0's record through `change`: the fd server of rank 0 has
// dropped rank 1 as too slow, or is full of silent callers from the start.
void meets_past(const std::function<std::string(const std::string& said)>& change) {
  const auto ends = run(2, quick(), [&](RankContext& me) {
    FaultyStore store(me.store, {}, [&](const std::string& key, const std::string& value) {
      return me.rank == 1 && key == "hello/0" ? change(value) : value;
    });
    Group group(store, me.rank, me.world, me.settings);
    return std::string("right");
  });
  for (const RankExit& end : ends) {
    expect_equal(end.said, "right");
    expect(end.when < 10s, "took too long");
  }
}

void meets_past_strangers() {
  std::vector<Descriptor> silent;
  meets_past([&](const std::string& said) {
    const SocketName there(name_of(PeerInfo::decode(said).ticket));
    while (silent.size() < 150) {
      silent.push_back(make_socket(SOCK_SEQPACKET));
      expect(connect(silent.back().get(), there.get(), there.bytes) == 0, "connect");
    }
    return said;
  });
}

void meets_although_put_out() {
  std::optional<FakeFdServer> pretender;
  meets_past([&](const std::string& said) {
    if (pretender) return said;
    PeerInfo it = PeerInfo::decode(said);
    const FdServer::FdTicket real = it.ticket;
    const auto answer = [=](const Descriptor& caller) {
      receive_fd(caller.get(), 0);
      send_fd(caller.get(), 7, fetch(real).get());
    };
    const auto put_out = [](const Descriptor&) {};
    it.ticket =
        pretender.emplace(std::vector<FakeFdServer::Answer>{put_out, put_out, answer}).ticket;
    return it.encode();
  });
}

// The fd server closes at any moment: a queued caller then asks again and is refused.
void hears_that_the_owner_has_gone() {
  for (int i = 0; i < 300; ++i) {
    const FdServer::FdTicket ticket{random_number(), 7};
    Descriptor socket = make_socket(SOCK_SEQPACKET, name_of(ticket));
    expect(listen(socket.get(), 9) == 0, "listen");
    std::jthread owner([&] {
      pollfd comes = {socket.get(), POLLIN, 0};
      while (poll(&comes, 1, 0) == 0) continue;  // as fast as the caller asks
      socket = Descriptor();
    });
    const std::string said = refusal([&] { fetch(ticket, deadline_after(5s)); });
    expect(contains(said, "cannot reach") && contains(said, "Connection refused"), said);
  }
}

// The fd server does not answer, while a profiler's signals keep interrupting the wait for it.
void waits_no_longer_for_signals() {
  std::atomic<bool> over{false};
  const FakeFdServer pretender({[&](const Descriptor&) {
    for (const auto begin = Clock::now(); !over && Clock::now() - begin < 5s;)
      std::this_thread::sleep_for(1ms);
  }});
  struct sigaction act = {};
  act.sa_handler = [](int) {};
  sigaction(SIGUSR1, &act, nullptr);
  std::jthread profiler([&, asks = pthread_self()] {
    for (; !over; std::this_thread::sleep_for(2ms)) pthread_kill(asks, SIGUSR1);
  });
  const auto begin = Clock::now();
  const std::string said = refusal([&] { fetch(pretender.ticket, deadline_after(200ms)); });
  const auto took = Clock::now() - begin;
  over = true;
  expect(contains(said, "does not answer"), said);
  expect(took > 150ms && took < 2s, "not at its deadline");
}

// The fd server answers despite many silent callers, and callers that send more than a request.
void answers_past_who_says_nothing() {
  FdServer fd_server;
  const auto ticket = fd_server.offer(Descriptor(dup(STDERR_FILENO)));
  const SocketName there(name_of(ticket));
  std::vector<Descriptor> silent;
  for (int i = 0; i < 20; ++i) {
    silent.push_back(make_socket(SOCK_SEQPACKET));
    expect(connect(silent.back().get(), there.get(), there.bytes) == 0, "connect");
  }
  const auto begin = Clock::now();
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
  expect(Clock::now() - begin < 5s, "silent callers held it up");
  const int before = count_entries("/proc/self/fd");
  send_many(silent.front().get(), ticket.number, 2);
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
  expect(count_entries("/proc/self/fd") <= before, "descriptors of a stranger are left");
}

void lets_no_other_users_in() {
  FdServer fd_server;
  const auto ticket = fd_server.offer(Descriptor(dup(STDERR_FILENO)));
  as_another_user([&] { _exit(refusal([&] { fetch(ticket); }) == "nothing" ? 1 : 0); });
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
}

// Strings of a rank without a terminator; the memory behind them is not zero, either.
void reads_no_further_than_the_words() {
  Settings settings = quick();
  MapStore store;
  Group group(store, 0, 1, settings);
  const CallFingerprint refused{.call = 1, .post = {.flags = Fingerprint::refused}};
  publish_refusal(group, refused, "why");
  FingerprintDetails& d = group.fingerprint_details(0, 1);
  d.refusal.fill('x');
  std::memset(static_cast<void*>(&d + 1), 'x', 2 * sizeof(uint64_t));
  const std::string said =
      refusal([&] { agree(group, refused, 1, {"all_reduce", 1, Clock::now()}); });
  expect_equal(said, "invalid_argument: rank 0 refused " + std::string(d.refusal.size(), 'x'));

  struct {
    AbortRecord record;
    std::array<char, 64> behind;
  } memory;
  memory.record.operation.fill('o'), memory.record.cause.fill('c'), memory.behind.fill('b');
  memory.record.state = AbortRecord::lost;
  const AbortState abort_state(memory.record, "g");
  const std::string words = refusal([&] { abort_state.rethrow({"send", 3, Clock::now()}); });
  expect_equal(words, "PeerLost: send #3 of group 'g': broken since " + std::string(48, 'o') +
                          " #0: " + std::string(512, 'c'));
}

// Published numbers of collectives, dtypes and operations that do not exist.
void names_no_more_than_there_are() {
  const auto ends = run(2, quick(), [](RankContext& me) {
    Group group(me.store, me.rank, me.world, me.settings);
    const CallFingerprint mine{.call = 1,
                               .post = {.fingerprint_hash = 1 + static_cast<uint64_t>(me.rank)}};
    const Request request{.collective = Collective::all_reduce};
    publish(group, mine, &request);
    FingerprintDetails& d = group.fingerprint_details(me.rank, 1);
    d.collective = me.rank == 0 ? 0 : 200, d.dtype = 201, d.op = 202;
    group.advance(at_run(1) + 1);
    return refusal([&] { agree(group, mine, 1, me.context(10s)); });
  });
  for (const RankExit& end : ends)
    expect_equal(end.said,
                 "invalid_argument: all ranks of a group must make the same call: rank 1 called "
                 "number 200 of 0 number 201, rank 0 called all_reduce of 0 number 201, op number "
                 "202");
}

}  // namespace
}  // namespace pycollect::shm

int main() {
  using namespace pycollect::shm;
  keeps_no_descriptor_of_several();
  takes_nothing_from_other_users();
  meets_past_strangers();
  meets_although_put_out();
  hears_that_the_owner_has_gone();
  waits_no_longer_for_signals();
  answers_past_who_says_nothing();
  lets_no_other_users_in();
  reads_no_further_than_the_words();
  names_no_more_than_there_are();
  std::puts("untrusted_test: all good");
}
