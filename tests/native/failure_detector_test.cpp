// Failure detection by a lock in shared memory: it reports that its holder has ended, in whatever
// way, but nothing while the holder lives, whatever its threads and children do.
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cstring>
#include <semaphore>

#include "../../csrc/bootstrap/fd_server.h"
#include "group_ranks.h"

namespace pycollect::shm {
namespace {

// A control block that is shared with forked children.
class Shared {
 public:
  Shared() : segment_(Segment::create(sizeof(Control))) { segment_->commit(0, sizeof(Control)); }
  Control& operator*() const { return *reinterpret_cast<Control*>(segment_->data()); }

 private:
  std::shared_ptr<Segment> segment_;
};

// Forks a child that becomes rank 1 and runs `body`; returns its pid when the rank has registered.
template <typename Body>
pid_t rank_one(Control& control, const Body& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    auto* peers = new FailureDetector(control, 2, 1);
    body(peers);
    for (;;) pause();
  }
  while (control.liveness[1].pid == 0) std::this_thread::sleep_for(1ms);
  return pid;
}

void expect_death(FailureDetector& peers, const std::string& how) {
  const auto begin = Clock::now();
  while (peers.dead() != 2) {
    expect(Clock::now() - begin < 1s, "death not noticed: " + how);
    std::this_thread::sleep_for(1ms);
  }
}

void end(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

void is_quiet_about_who_has_not_come() {
  const Shared control;
  FailureDetector peers(*control, 3, 0);
  expect(peers.dead() == 0, "a rank that never joined is dead");
}

// Several threads poll at once, where a sanitizer sees them.
void is_asked_by_many() {
  const Shared control;
  FailureDetector one(*control, 3, 0), other(*control, 3, 1);
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (FailureDetector* peers : {&one, &other, &one, &other})
      threads.emplace_back([&wrong, peers] {
        for (int i = 0; i < 5000; ++i) wrong += peers->dead() != 0;
      });
    const FailureDetector leaves(*control, 3, 2);
  }
  expect(wrong == 0, "a live rank was taken for dead");
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
#if defined(__x86_64__)
  const auto call = [](long number, long a, long b, long c) {
    asm volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  };
  std::ifstream maps("/proc/self/maps");
  const auto here = reinterpret_cast<unsigned long>(__builtin_frame_address(0));
  const auto thread = reinterpret_cast<unsigned long>(pthread_self());
  std::array<std::pair<long, long>, 1000> taken = {};
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line) && count < taken.size();) {
    unsigned long begin = 0, end = 0, inode = 0;
    std::array<char, 5> may = {};
    std::array<char, 2> name = {};
    const int found = std::sscanf(line.c_str(), "%lx-%lx %4s %*x %*s %lu %1s", &begin, &end,
                                  may.data(), &inode, name.data());
    const bool needed = (begin <= here && here < end) || (begin <= thread && thread < end);
    if (found == 4 && std::strcmp(may.data(), "rw-p") == 0 && inode == 0 && !needed)
      taken[count++] = {begin, end - begin};
  }
  for (std::size_t i = 0; i < count; ++i)
    call(SYS_madvise, taken[i].first, taken[i].second, MADV_DONTNEED);
  call(SYS_kill, getpid(), SIGKILL, 0);
#else
  kill(getpid(), SIGKILL);
#endif
}

// Every end is noticed before the process is reaped; until then it keeps its pid.
void notices_every_end() {
  const std::pair<const char*, void (*)(FailureDetector*)> ends[] = {
      {"SIGKILL", [](FailureDetector*) { kill(getpid(), SIGKILL); }},
      {"_exit", [](FailureDetector*) { _exit(0); }},
      {"exit", [](FailureDetector*) { std::exit(0); }},
      {"exit in another thread", [](FailureDetector*) { std::thread([] { _exit(0); }).join(); }},
      {"abort", [](FailureDetector*) { signal(SIGABRT, SIG_DFL), std::abort(); }},
      {"SIGKILL when the first thread has ended",
       [](FailureDetector*) { end_without_first_thread(); }},
      {"SIGKILL when its own memory has been taken",
       [](FailureDetector*) { end_without_memory(); }},
      {"exec", [](FailureDetector*) { execl("/bin/sleep", "sleep", "60", nullptr); }},
      {"exec in another thread",
       [](FailureDetector*) {
         std::thread([] { execl("/bin/sleep", "sleep", "60", nullptr); }).join();
       }},
  };
  for (const auto& [how, body] : ends) {
    const Shared control;
    FailureDetector peers(*control, 2, 0);
    const pid_t pid = rank_one(*control, [body = body](FailureDetector* own) {
      std::this_thread::sleep_for(50ms);
      body(own);
    });
    expect(peers.dead() == 0, text("dead before: ", how));
    expect_death(peers, how);
    expect_death(peers, text("asked again: ", how));
    end(pid);
  }
}

// Events of rank 1 that are not its death: it stops, or its child, thread or program ends.
void tells_what_else_ends() {
  const std::pair<const char*, void (*)(FailureDetector*)> events[] = {
      {"leaves", [](FailureDetector* own) { delete own; }},
      {"stops", [](FailureDetector*) { kill(getpid(), SIGSTOP); }},
      {"a child ends",
       [](FailureDetector* own) {
         if (fork() == 0) delete own, _exit(0);
       }},
      {"a child becomes another program",
       [](FailureDetector*) {
         if (fork() == 0) execl("/bin/true", "true", nullptr), _exit(0);
       }},
      {"a program that it spawned ends", [](FailureDetector*) { (void)!std::system("true"); }},
      {"threads end",
       [](FailureDetector*) {
         for (int i = 0; i < 20; ++i) std::thread([] {}).join();
       }},
      {"the first thread ends", [](FailureDetector*) { syscall(SYS_exit, 0); }},
      {"cannot become another program",
       [](FailureDetector*) { execl("/there is no such", "program", nullptr); }},
      {"another group of its own ends",
       [](FailureDetector*) {
         const Shared other;
         const FailureDetector also(*other, 2, 1);
       }},
  };
  for (const auto& [what, body] : events) {
    const Shared control;
    FailureDetector peers(*control, 2, 0);
    const pid_t pid = rank_one(*control, body);
    const auto begin = Clock::now();
    while (Clock::now() - begin < 200ms) {
      expect(peers.dead() == 0, text("was taken for dead: ", what));
      std::this_thread::sleep_for(5ms);
    }
    end(pid);
    if (std::strcmp(what, "leaves") != 0) expect_death(peers, text("afterwards: ", what));
  }
}

void notices_past_what_is_left() {
  const Shared control;
  FailureDetector peers(*control, 2, 0);
  const pid_t pid = rank_one(*control, [](FailureDetector*) {
    if (fork() == 0) {
      std::this_thread::sleep_for(2s);
      _exit(0);
    }
  });
  end(pid);
  expect_death(peers, "a child is left");
}

// A process that is rank 1 of several groups is reported dead in each, except in those it had left.
void notices_in_every_group() {
  const Shared first, second, third;
  FailureDetector one(*first, 2, 0), two(*second, 2, 0), three(*third, 2, 0);
  const pid_t pid = rank_one(*first, [&](FailureDetector*) {
    std::make_unique<FailureDetector>(*third, 2, 1).reset();
    new FailureDetector(*second, 2, 1);
  });
  while (two.pid(1) == 0) std::this_thread::sleep_for(1ms);
  end(pid);
  expect_death(one, "in the first group");
  expect_death(two, "in the second group");
  expect(three.dead() == 0, "a rank that had left the third group is dead there");
}

// A forked child's threads are left alone, even if they occupy the places of its parent's threads.
void leaves_a_childs_threads_alone() {
  const Shared control;
  auto peers = std::make_unique<FailureDetector>(*control, 2, 0);
  auto fd_server = std::make_unique<FdServer>();
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    std::binary_semaphore over(0);
    const auto body = [&] { over.acquire(), over.release(); };
    std::thread one(body), other(body);
    peers.reset(), fd_server.reset();
    over.release();
    one.join(), other.join();
    _exit(7);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child did not end normally");
}

// Signals are left to the caller's threads: while all of those block a signal, it stays pending.
void leaves_signals_to_the_others() {
  const Shared control;
  FailureDetector peers(*control, 2, 0);
  const pid_t pid = rank_one(*control, [](FailureDetector*) {
    sigset_t put_off;
    sigemptyset(&put_off), sigaddset(&put_off, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &put_off, nullptr);
    signal(SIGUSR1, [](int) { _exit(1); });
    kill(getpid(), SIGUSR1);
  });
  std::this_thread::sleep_for(100ms);
  expect(peers.dead() == 0, "dead of a signal");
  end(pid);
  expect_death(peers, "afterwards");
}

}  // namespace
}  // namespace pycollect::shm

int main() {
  using namespace pycollect::shm;
  is_quiet_about_who_has_not_come();
  is_asked_by_many();
  if (std::getenv("NO_FORK") == nullptr) {
    notices_every_end();
    tells_what_else_ends();
    notices_past_what_is_left();
    notices_in_every_group();
    leaves_a_childs_threads_alone();
    leaves_signals_to_the_others();
  }
  std::puts("failure_detector_test: all good");
}
