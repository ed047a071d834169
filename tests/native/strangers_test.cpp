// What others of the machine can do to a group: names in /dev/shm that are not ours, letters with
// too many descriptors, processes of other users, words without an end.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstring>

#include "../../csrc/shm/agreement.h"
#include "../../csrc/shm/broken.h"
#include "../../csrc/shm/hatch.h"
#include "../../csrc/shm/introduction.h"
#include "../../csrc/shm/outlet.h"
#include "../../csrc/shm/unix_socket.h"
#include "group_ranks.h"

namespace pycollect::shm {
namespace {

constexpr uid_t kNobody = 65534;

// In a child that has been given another user.
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
  expect(status == 0, "could not become another user");
  return true;
}

// Opening it would wait for its other end for ever.
void is_not_held_up_by_a_pipe() {
  const std::string pipe = "/dev/shm/pycollect-pipe", link = "/dev/shm/pycollect-link";
  unlink(pipe.c_str()), unlink(link.c_str());
  expect(mkfifo(pipe.c_str(), 0666) == 0 && symlink(pipe.c_str(), link.c_str()) == 0, "mkfifo");
  alarm(20);
  Segment::create_named(Segment::name_of(3), 4096);
  alarm(0);
  Segment::remove_name(Segment::name_of(3));
  struct stat found = {};
  expect(lstat(pipe.c_str(), &found) == 0 && lstat(link.c_str(), &found) == 0, "it was removed");
  unlink(pipe.c_str()), unlink(link.c_str());
}

void leaves_others_files_alone() {
  const std::string file = "/dev/shm/pycollect-other";
  if (!as_another_user([&] { open(file.c_str(), O_CREAT | O_RDWR, 0666); })) return;
  Segment::create_named(Segment::name_of(3), 4096);
  Segment::remove_name(Segment::name_of(3));
  struct stat found = {};
  expect(stat(file.c_str(), &found) == 0, "it was removed");
  unlink(file.c_str());
}

// As many descriptors as there are room for in a letter, and one more.
void send_many(int socket, const SocketName* to, uint64_t number, int count) {
  std::vector<char> control(CMSG_SPACE(sizeof(int) * count));
  iovec data = {&number, sizeof number};
  msghdr header = {};
  header.msg_iov = &data, header.msg_iovlen = 1;
  header.msg_control = control.data(), header.msg_controllen = control.size();
  if (to != nullptr) header.msg_name = const_cast<sockaddr*>(to->get());
  if (to != nullptr) header.msg_namelen = to->bytes;
  cmsghdr* with = CMSG_FIRSTHDR(&header);
  with->cmsg_level = SOL_SOCKET, with->cmsg_type = SCM_RIGHTS;
  with->cmsg_len = CMSG_LEN(sizeof(int) * count);
  const std::vector<int> all(count, STDERR_FILENO);
  std::memcpy(CMSG_DATA(with), all.data(), sizeof(int) * count);
  expect(sendmsg(socket, &header, 0) == sizeof number, "sendmsg");
}

void keeps_no_descriptor_of_several() {
  for (const int count : {1, 2, 3, 9}) {
    Hatch hatch;
    const SocketName there(hatch.address());
    const Descriptor socket = make_socket(SOCK_DGRAM);
    const int before = count_entries("/proc/self/fd");
    for (int i = 0; i < 5; ++i) send_many(socket.get(), &there, 5, count);
    const std::string said = refusal([&] { hatch.take(6); });
    expect(contains(said, "did not hand over"), said);
    expect(count_entries("/proc/self/fd") == before, text(count, " descriptors: some are left"));
    send_many(socket.get(), &there, 7, count);
    const std::string taken = refusal([&] { hatch.take(7); });
    expect(count == 1 ? taken == "nothing" : contains(taken, "cannot take"), taken);
    expect(count_entries("/proc/self/fd") == before, text(count, " descriptors: some are left"));
  }
}

void takes_nothing_from_other_users() {
  Hatch hatch;
  const auto stranger = [&] {
    hand_in(hatch.address(), STDERR_FILENO, 7);  // even if it knows the number
    if (contains(refusal([&] { hand_in(hatch.address(), STDERR_FILENO, 8); }), "cannot")) _exit(1);
  };
  if (!as_another_user(stranger)) return;
  const std::string said = refusal([&] { hatch.take(7); });
  expect(contains(said, "did not hand over"), said);
  hand_in(hatch.address(), STDERR_FILENO, 9);
  expect(static_cast<bool>(hatch.take(9)), "a descriptor of its own user's");
}

// Until nobody can hand in anything.
void fill_queue(const std::string& address) {
  const SocketName there(address);
  const Descriptor socket = make_socket(SOCK_DGRAM);
  while (send_letter(socket.get(), 1, -1, &there)) continue;
}

// Strangers fill the queue; the owner looks now and then.
void is_reached_through_a_full_queue() {
  Hatch hatch;
  fill_queue(hatch.address());
  std::thread owner([&] {
    std::this_thread::sleep_for(100ms);
    hatch.sort(7);
  });
  const std::string said = refusal([&] { hand_in(hatch.address(), STDERR_FILENO, 7); });
  owner.join();
  expect_equal(said, "nothing");
  expect(static_cast<bool>(hatch.take(7)), "nothing was handed in");
}

// As soon as they know where: the rank looks twice in a second, if the machine is not too crowded.
void meets_past_a_full_queue() {
  std::set<std::string> said;
  Settings settings = quick();
  settings.share = Share::memfd;
  for (int tries = 0; tries < 5 && !said.contains("right"); ++tries) {
    const auto ends = run(2, settings, [](Me& me) {
      LyingBoard crowded(me.board, {}, [](const std::string& key, const std::string& value) {
        if (key == "hello/1") fill_queue(Introduction::decode(value).hatch);
        return value;
      });
      Group group(me.rank == 0 ? crowded : me.board, me.rank, me.world, me.settings);
      return std::string("right");
    });
    said.insert(ends.front().said);
  }
  expect(said.contains("right"), *said.begin());
}

std::string name_of(const Outlet::Ticket& ticket) {
  return text("pycollect-outlet-", hexadecimal(ticket.outlet));
}

// However many come and say nothing, and whoever sends more than a question.
void answers_past_who_says_nothing() {
  Outlet outlet;
  const auto ticket = outlet.offer(Descriptor(dup(STDERR_FILENO)));
  const SocketName there(name_of(ticket));
  std::vector<Descriptor> silent;
  for (int i = 0; i < 20; ++i) {
    silent.push_back(make_socket(SOCK_SEQPACKET));
    expect(connect(silent.back().get(), there.get(), there.bytes) == 0, "connect");
  }
  const auto begin = Clock::now();
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
  expect(Clock::now() - begin < 5s, "who says nothing held it up");
  const int before = count_entries("/proc/self/fd");
  send_many(silent.front().get(), nullptr, ticket.number, 2);
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
  expect(count_entries("/proc/self/fd") <= before, "descriptors of a stranger's are left");
}

void lets_no_other_users_in() {
  Outlet outlet;
  const auto ticket = outlet.offer(Descriptor(dup(STDERR_FILENO)));
  as_another_user([&] { _exit(refusal([&] { fetch(ticket); }) == "nothing" ? 1 : 0); });
  expect(static_cast<bool>(fetch(ticket)), "nothing was fetched");
}

// Words of a rank's that have no end, and what follows them in the memory is no zero either.
void reads_no_further_than_the_words() {
  Settings settings = quick();
  MapBoard board;
  Group group(board, 0, 1, settings);
  const Statement refused{.call = 1, .post = {.flags = Post::refused}};
  state_refusal(group, refused, "why");
  Description& d = group.description(0, 1);
  d.refusal.fill('x');
  std::memset(static_cast<void*>(&d + 1), 'x', 2 * sizeof(uint64_t));
  const std::string said =
      refusal([&] { agree(group, refused, 1, {"all_reduce", 1, Clock::now()}); });
  expect_equal(said, "invalid_argument: rank 0 refused " + std::string(d.refusal.size(), 'x'));

  struct {
    Breakage breakage;
    std::array<char, 64> behind;
  } memory;
  memory.breakage.operation.fill('o'), memory.breakage.cause.fill('c'), memory.behind.fill('b');
  memory.breakage.state = Breakage::lost;
  const Broken broken(memory.breakage, "g");
  const std::string words = refusal([&] { broken.rethrow({"send", 3, Clock::now()}); });
  expect_equal(words, "PeerLost: send #3 of group 'g': broken since " + std::string(48, 'o') +
                          " #0: " + std::string(512, 'c'));
}

// Of collectives, types and operations that there are not.
void names_no_more_than_there_are() {
  const auto ends = run(2, quick(), [](Me& me) {
    Group group(me.board, me.rank, me.world, me.settings);
    const Statement mine{.call = 1, .post = {.signature = 1 + static_cast<uint64_t>(me.rank)}};
    const Request request{.collective = Collective::all_reduce};
    state(group, mine, &request);
    Description& d = group.description(me.rank, 1);
    d.collective = me.rank == 0 ? 0 : 200, d.dtype = 201, d.op = 202;
    group.advance(at_run(1) + 1);
    return refusal([&] { agree(group, mine, 1, me.occasion(10s)); });
  });
  for (const End& end : ends)
    expect_equal(end.said,
                 "invalid_argument: ranks of a group must call the same: rank 1 called number 200 "
                 "of 0 number 201, rank 0 called all_reduce of 0 number 201, op number 202");
}

}  // namespace
}  // namespace pycollect::shm

int main() {
  using namespace pycollect::shm;
  is_not_held_up_by_a_pipe();
  leaves_others_files_alone();
  keeps_no_descriptor_of_several();
  takes_nothing_from_other_users();
  is_reached_through_a_full_queue();
  meets_past_a_full_queue();
  answers_past_who_says_nothing();
  lets_no_other_users_in();
  reads_no_further_than_the_words();
  names_no_more_than_there_are();
  std::puts("strangers_test: all good");
}
