// Failure detector: it reports that a rank's process has ended, however it ended, and nothing while
// the process lives, whatever its threads and children do.
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cstring>
#include <semaphore>

#include "../../csrc/group/fd_server.h"
#include "ranks.h"

namespace pycollect::ipc {
namespace {

// Returns a control block that is shared with forked children.
std::shared_ptr<Control> shared_control() {
  const auto segment = Segment::create(sizeof(Control));
  segment->commit(0, sizeof(Control));
  return {segment, reinterpret_cast<Control*>(segment->data())};
}

FailureDetector* own = nullptr;  // of a child that is rank 1

// Forks a child that becomes rank 1 and runs `body`; returns its pid when the rank has registered.
pid_t rank_one(Control& control, const std::function<void()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    own = new FailureDetector(control, 2, 1);
    body();
    for (;;) ::pause();
  }
  while (control.liveness[1].pid == 0) std::this_thread::sleep_for(1ms);
  return pid;
}

void expect_death(const FailureDetector& detector, const std::string& how) {
  const auto begin = Clock::now();
  while (detector.dead() != 2) {
    expect(Clock::now() - begin < 1s, "death not detected: " + how);
    std::this_thread::sleep_for(1ms);
  }
}

void end(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

// Several threads poll at once, where a sanitizer sees them; rank 2 joins and leaves, rank 3 never
// joins.
void may_be_polled_by_many_threads() {
  const auto control = shared_control();
  FailureDetector one(*control, 4, 0), other(*control, 4, 1);
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (FailureDetector* detector : {&one, &other, &one, &other})
      threads.emplace_back([&wrong, detector] {
        for (int i = 0; i < 5000; ++i) wrong += detector->dead() != 0;
      });
    const FailureDetector leaves(*control, 4, 2);
  }
  expect(wrong == 0 && one.dead() == 0, "a rank was reported dead");
  expect(one.pid(1) == getpid(), "wrong pid of rank 1");
}

void end_without_first_thread() {
  std::thread([] {
    std::this_thread::sleep_for(50ms);
    kill(getpid(), SIGKILL);
  }).detach();
  syscall(SYS_exit, 0);
}

// Frees all unshared memory of this process, as the kernel's out-of-memory killer may do before the
// process's threads have ended, then kills it. The code after that must not use such memory.
void end_without_memory() {
  std::ifstream maps("/proc/self/maps");
  const auto here = reinterpret_cast<unsigned long>(__builtin_frame_address(0));
  const auto thread = reinterpret_cast<unsigned long>(pthread_self());
  std::array<std::pair<unsigned long, unsigned long>, 1000> taken = {};
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line) && count < taken.size();) {
    unsigned long begin = 0, end = 0, inode = 0;
    char name = 0;
    const int found =
        std::sscanf(line.c_str(), "%lx-%lx rw-p %*x %*s %lu %c", &begin, &end, &inode, &name);
    const bool needed = (begin <= here && here < end) || (begin <= thread && thread < end);
    if (found == 3 && inode == 0 && !needed) taken[count++] = {begin, end - begin};
  }
  const long me = syscall(SYS_getpid);  // binds the function, which uses the stack only
  for (std::size_t i = 0; i < count; ++i)
    syscall(SYS_madvise, taken[i].first, taken[i].second, MADV_DONTNEED);
  syscall(SYS_kill, me, SIGKILL);
}

void exec(const char* program, const char* argument = nullptr) {
  execl(program, program, argument, nullptr);
}
void fork_and(const std::function<void()>& body) {
  if (fork() == 0) body(), _exit(0);
}
void sleep() { exec("/bin/sleep", "60"); }

// Every end is detected before the process is reaped; until then it keeps its pid.
void detects_every_end() {
  const std::pair<const char*, void (*)()> ends[] = {
      {"SIGKILL", [] { kill(getpid(), SIGKILL); }},
      {"_exit", [] { _exit(0); }},
      {"exit", [] { std::exit(0); }},
      {"exit in another thread", [] { std::thread([] { _exit(0); }).join(); }},
      {"abort", [] { signal(SIGABRT, SIG_DFL), std::abort(); }},
      {"SIGKILL when the first thread has ended", end_without_first_thread},
      {"SIGKILL when its own memory has been reclaimed", end_without_memory},
      {"exec", sleep},
      {"exec in another thread", [] { std::thread(sleep).join(); }}};
  for (const auto& [how, body] : ends) {
    const auto control = shared_control();
    FailureDetector detector(*control, 2, 0);
    const pid_t pid = rank_one(*control, [body = body] {
      std::this_thread::sleep_for(50ms);
      body();
    });
    expect(detector.dead() == 0, text("dead before: ", how));
    expect_death(detector, how);
    end(pid);
  }
}

// The detector's thread handles no signals: while the caller's thread blocks one, it stays pending.
void receive_a_blocked_signal() {
  sigset_t blocked;
  sigemptyset(&blocked), sigaddset(&blocked, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  signal(SIGUSR1, [](int) { _exit(1); });
  kill(getpid(), SIGUSR1);
}

// Events of rank 1 that are not its death; afterwards its death is detected despite them.
void ignores_other_events() {
  const std::pair<const char*, void (*)()> events[] = {
      {"leaves", [] { delete own; }},
      {"stops", [] { kill(getpid(), SIGSTOP); }},
      {"a child ends", [] { fork_and([] { delete own; }); }},
      {"a child lives on", [] { fork_and([] { std::this_thread::sleep_for(2s); }); }},
      {"a child becomes another program", [] { fork_and([] { exec("/bin/true"); }); }},
      {"a program that it spawned ends", [] { (void)!std::system("true"); }},
      {"a thread ends", [] { std::thread([] {}).join(); }},
      {"the first thread ends", [] { syscall(SYS_exit, 0); }},
      {"cannot become another program", [] { exec("/there is no such program"); }},
      {"receives a blocked signal", receive_a_blocked_signal}};
  for (const auto& [what, body] : events) {
    const auto control = shared_control();
    FailureDetector detector(*control, 2, 0);
    const pid_t pid = rank_one(*control, body);
    for (const auto begin = Clock::now(); Clock::now() - begin < 200ms;) {
      expect(detector.dead() == 0, text("reported dead: ", what));
      std::this_thread::sleep_for(5ms);
    }
    end(pid);
    if (std::strcmp(what, "leaves") != 0) expect_death(detector, text("afterwards: ", what));
  }
}

// A process that is rank 1 of several groups is reported dead in each, except in those it had left.
void detects_death_in_every_group() {
  const auto first = shared_control(), second = shared_control(), third = shared_control();
  FailureDetector one(*first, 2, 0), two(*second, 2, 0), three(*third, 2, 0);
  const pid_t pid = rank_one(*first, [&] {
    std::make_unique<FailureDetector>(*third, 2, 1).reset();
    new FailureDetector(*second, 2, 1);
  });
  while (two.pid(1) == 0) std::this_thread::sleep_for(1ms);
  end(pid);
  expect_death(one, "in the first group");
  expect_death(two, "in the second group");
  expect(three.dead() == 0, "a rank that had left the third group is dead there");
}

// In a forked child, the destructors leave the child's threads alone, even if these reuse the
// memory of the parent's threads.
void spares_threads_of_a_child() {
  const auto control = shared_control();
  auto detector = std::make_unique<FailureDetector>(*control, 2, 0);
  auto fd_server = std::make_unique<FdServer>(STDERR_FILENO);
  expect_in_child([&] {
    std::binary_semaphore over(0);
    const auto body = [&] { over.acquire(), over.release(); };
    std::thread one(body), other(body);
    detector.reset(), fd_server.reset();
    over.release();
    one.join(), other.join();
  });
  fetch(fd_server->id(), deadline_after(10s));  // the parent's threads are spared, too
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  may_be_polled_by_many_threads();
  if (pycollect::forks()) {
    detects_every_end();
    ignores_other_events();
    detects_death_in_every_group();
    spares_threads_of_a_child();
  }
  std::puts("failure_detector_test: all good");
}
