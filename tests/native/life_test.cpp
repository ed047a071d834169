// What a lock in shared memory tells of who holds it: that it has ended, however that came, and
// nothing while it lives, whatever its threads and children do.
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cstring>
#include <semaphore>

#include "../../csrc/shm/outlet.h"
#include "group_ranks.h"

namespace pycollect::shm {
namespace {

// Shared with children.
class Shared {
 public:
  Shared() : segment_(Segment::create(sizeof(Control))) { segment_->commit(0, sizeof(Control)); }
  Control& operator*() const { return *reinterpret_cast<Control*>(segment_->data()); }

 private:
  std::shared_ptr<Segment> segment_;
};

// Becomes rank 1 beside this process, says so, and goes on as `body` says.
template <typename Body>
pid_t rank_one(Control& control, const Body& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    auto* peers = new Peers(control, 2, 1);
    body(peers);
    for (;;) pause();
  }
  while (control.lives[1].pid == 0) std::this_thread::sleep_for(1ms);
  return pid;
}

void expect_death(Peers& peers, const std::string& how) {
  const auto begin = Clock::now();
  while (peers.dead() != 2) {
    expect(Clock::now() - begin < 1s, "nobody noticed: " + how);
    std::this_thread::sleep_for(1ms);
  }
}

void end(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

void is_quiet_about_who_has_not_come() {
  const Shared control;
  Peers peers(*control, 3, 0);
  expect(peers.dead() == 0, "who never came is dead");
}

// By threads, which a sanitizer sees.
void is_asked_by_many() {
  const Shared control;
  Peers one(*control, 3, 0), other(*control, 3, 1);
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (Peers* peers : {&one, &other, &one, &other})
      threads.emplace_back([&wrong, peers] {
        for (int i = 0; i < 5000; ++i) wrong += peers->dead() != 0;
      });
    const Peers leaves(*control, 3, 2);
  }
  expect(wrong == 0, "a live one was taken for a dead one");
  expect(one.pid(1) == getpid(), "whose number");
}

void end_without_first_thread() {
  std::thread([] {
    std::this_thread::sleep_for(50ms);
    kill(getpid(), SIGKILL);
  }).detach();
  syscall(SYS_exit, 0);
}

// What the kernel takes from a process that it kills for want of memory, perhaps before its threads
// have ended: all that nobody shares. Nothing here may need any of it afterwards.
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

// Before it is waited for: a process that has ended keeps its number until then.
void notices_every_end() {
  const std::pair<const char*, void (*)(Peers*)> ends[] = {
      {"SIGKILL", [](Peers*) { kill(getpid(), SIGKILL); }},
      {"_exit", [](Peers*) { _exit(0); }},
      {"exit", [](Peers*) { std::exit(0); }},
      {"exit in another thread", [](Peers*) { std::thread([] { _exit(0); }).join(); }},
      {"abort", [](Peers*) { signal(SIGABRT, SIG_DFL), std::abort(); }},
      {"SIGKILL when the first thread has ended", [](Peers*) { end_without_first_thread(); }},
      {"SIGKILL when its own memory has been taken", [](Peers*) { end_without_memory(); }},
      {"exec", [](Peers*) { execl("/bin/sleep", "sleep", "60", nullptr); }},
      {"exec in another thread",
       [](Peers*) { std::thread([] { execl("/bin/sleep", "sleep", "60", nullptr); }).join(); }},
  };
  for (const auto& [how, body] : ends) {
    const Shared control;
    Peers peers(*control, 2, 0);
    const pid_t pid = rank_one(*control, [body = body](Peers* own) {
      std::this_thread::sleep_for(50ms);
      body(own);
    });
    expect(peers.dead() == 0, text("dead before: ", how));
    expect_death(peers, how);
    expect_death(peers, text("asked again: ", how));
    end(pid);
  }
}

// A child, a thread and a program that this process begins end, or outlive it.
void tells_what_else_ends() {
  const std::pair<const char*, void (*)(Peers*)> events[] = {
      {"leaves", [](Peers* own) { delete own; }},
      {"stops", [](Peers*) { kill(getpid(), SIGSTOP); }},
      {"a child ends",
       [](Peers* own) {
         if (fork() == 0) delete own, _exit(0);
       }},
      {"a child becomes another program",
       [](Peers*) {
         if (fork() == 0) execl("/bin/true", "true", nullptr), _exit(0);
       }},
      {"a program that it spawned ends", [](Peers*) { (void)!std::system("true"); }},
      {"threads end",
       [](Peers*) {
         for (int i = 0; i < 20; ++i) std::thread([] {}).join();
       }},
      {"the first thread ends", [](Peers*) { syscall(SYS_exit, 0); }},
      {"cannot become another program",
       [](Peers*) { execl("/there is no such", "program", nullptr); }},
      {"another group of its own ends",
       [](Peers*) {
         const Shared other;
         const Peers also(*other, 2, 1);
       }},
  };
  for (const auto& [what, body] : events) {
    const Shared control;
    Peers peers(*control, 2, 0);
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
  Peers peers(*control, 2, 0);
  const pid_t pid = rank_one(*control, [](Peers*) {
    if (fork() == 0) {
      std::this_thread::sleep_for(2s);
      _exit(0);
    }
  });
  end(pid);
  expect_death(peers, "a child is left");
}

// Each of them, and no more: a process can be rank 1 of several groups.
void notices_in_every_group() {
  const Shared first, second, third;
  Peers one(*first, 2, 0), two(*second, 2, 0), three(*third, 2, 0);
  const pid_t pid = rank_one(*first, [&](Peers*) {
    std::make_unique<Peers>(*third, 2, 1).reset();
    new Peers(*second, 2, 1);
  });
  while (two.pid(1) == 0) std::this_thread::sleep_for(1ms);
  end(pid);
  expect_death(one, "in the first group");
  expect_death(two, "in the second group");
  expect(three.dead() == 0, "had left the third group, and is dead there");
}

// Its threads are not the parent's, even if they have taken their places.
void leaves_a_childs_threads_alone() {
  const Shared control;
  auto peers = std::make_unique<Peers>(*control, 2, 0);
  auto outlet = std::make_unique<Outlet>();
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    std::binary_semaphore over(0);
    const auto body = [&] { over.acquire(), over.release(); };
    std::thread one(body), other(body);
    peers.reset(), outlet.reset();
    over.release();
    one.join(), other.join();
    _exit(7);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child came to grief");
}

// They are for threads that know what to do with them: when all of those put one off, it waits.
void leaves_signals_to_the_others() {
  const Shared control;
  Peers peers(*control, 2, 0);
  const pid_t pid = rank_one(*control, [](Peers*) {
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
  std::puts("life_test: all good");
}
