// How a process is watched once for many groups: what they learn of it, whatever it becomes.
#include <signal.h>

#include <atomic>

#include "group_ranks.h"

namespace pycollect::shm {
namespace {

std::unique_ptr<Peers> watch(pid_t pid) { return watch_by_pidfd({getpid(), pid}, 0); }

template <typename Body>
pid_t child(const Body& body) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  alarm(60);
  body();
  _exit(0);
}

void expect_death(Peers& peers, const std::string& what) {
  const auto end = Clock::now() + 20s;
  while (peers.dead() != 2) expect(Clock::now() < end, what), std::this_thread::sleep_for(1ms);
}

void opens_each_once() {
  const int before = count_entries("/proc/self/fd");
  {
    const auto first = watch(getppid());
    const int one = count_entries("/proc/self/fd");
    expect(one > before, "nothing was opened");
    std::vector<std::unique_ptr<Peers>> more;
    for (int i = 0; i < 9; ++i) more.push_back(watch(getppid()));
    expect(count_entries("/proc/self/fd") == one, "it was opened again");
  }
  expect(count_entries("/proc/self/fd") == before, "it is open still");
}

// Begun and ended while others begin and end.
void is_shared_by_threads() {
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int n = 0; n < 500; ++n) wrong += watch(getppid())->dead() != 0;
    });
  for (std::thread& thread : threads) thread.join();
  expect(wrong == 0, "a live process was taken for a dead one");
}

// A group of the one that ended says so, and one of the new program watches that.
void tells_a_program_from_its_successor() {
  const pid_t pid = child([] {
    std::this_thread::sleep_for(100ms);
    execl("/bin/sleep", "sleep", "60", nullptr);
  });
  const auto before = watch(pid);
  expect(before->dead() == 0, "it had not ended");
  expect_death(*before, "the other program was not noticed");
  const auto after = watch(pid);
  expect(after->dead() == 0, "the new program was taken for the old one");
  kill(pid, SIGKILL);
  expect_death(*after, "the end of the new program was not noticed");
  expect_death(*watch(pid), "one that has ended was taken for a live one");
  waitpid(pid, nullptr, 0);
  expect(watch(pid)->dead() == 2, "one that is not there was taken for a live one");
}

// At any moment of a thread that begins and ends to watch. Not under AddressSanitizer, whose
// allocator's locks stay locked in the child when that thread held one of them.
void watches_in_a_forked_child() {
  std::atomic<bool> end = false;
  const pid_t watched = getppid();
  std::thread busy([&] {
    while (!end) watch(watched);
  });
  for (int i = 0; i < 200; ++i) {
    int status = 0;
    waitpid(child([&] { alarm(10), _exit(watch(watched)->dead() == 0 ? 0 : 1); }), &status, 0);
    expect(status == 0, text("child ", i, " ended with ", status));
  }
  end = true;
  busy.join();
}

}  // namespace
}  // namespace pycollect::shm

int main() {
  using namespace pycollect::shm;
  opens_each_once();
  is_shared_by_threads();
  if (std::getenv("NO_FORK") == nullptr) {
    tells_a_program_from_its_successor();
#ifndef __SANITIZE_ADDRESS__
    watches_in_a_forked_child();
#endif
  }
  std::puts("life_test: all good");
}
