// Sends and receives between ranks: transfers in any order, mismatches, the death of a peer, and
// random programs of messages. The first argument is the number of random
// programs. With NO_FORK in the environment ranks are threads only.
#include <sys/resource.h>

#include "mailbox_faults.h"
#include "mailbox_full_ring.h"
#include "mailbox_invalid.h"
#include "mailbox_programs.h"
#include "mailbox_ranks.h"

namespace pycollect::ipc {
namespace {

void both_send_first(const Member& m) {
  const std::size_t n = std::getenv("NO_FORK") == nullptr ? 64 << 20 : 8 << 20;  // TSan is slow
  const Bytes mine = pattern(n, m.rank), other = pattern(n, 1 - m.rank);
  Bytes got(n);
  const auto sent = m.box.send(1 - m.rank, envelope(n), mine.data());
  check(!sent->done(), "a large send needs its receiver");
  const auto received = m.box.receive(1 - m.rank, envelope(n), got.data());
  m.wait(received);
  m.wait(sent);
  check(got == other && m.box.idle());
}

// The ring is full of messages of another tag when the awaited message is sent.
void other_tag_first(const Member& m) {
  constexpr int kMany = 1000;
  const std::size_t n = 700;
  if (m.rank == 0) {
    std::vector<Bytes> data;
    std::vector<TransferPtr> sent;
    for (int i = 0; i <= kMany; ++i) data.push_back(pattern(n, i));
    for (int i = 0; i <= kMany; ++i) {
      // Lets the receiver empty the ring while earlier messages are still queued for the ring.
      if (i == kMany / 2) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      sent.push_back(m.box.send(1, envelope(n, i == kMany ? 2 : 1), data[i].data()));
    }
    check(sent[0]->done(), "a small send is complete at once");
    for (const auto& it : sent) m.wait(it);
  } else {
    Bytes got(n);
    m.wait(m.box.receive(0, envelope(n, 2), got.data()));
    check(got == pattern(n, kMany));
    for (int i = 0; i < kMany; ++i) {
      m.wait(m.box.receive(0, envelope(n, 1), got.data()));
      check(got == pattern(n, i), text("message ", i));
    }
  }
}

void to_self(const Member& m) {
  for (const std::size_t n : {0, 8, 5000, 3 << 20}) {
    const Bytes data = pattern(n, n);
    Bytes first(n), second(n);
    const auto early = m.box.receive(m.rank, envelope(n, 5), first.data());
    const auto one = m.box.send(m.rank, envelope(n, 5), data.data());
    const auto two = m.box.send(m.rank, envelope(n, 5), data.data());
    const auto late = m.box.receive(std::nullopt, envelope(n, 5), second.data());
    for (const auto& it : {early, one, two, late}) m.wait(it);
    check(first == data && second == data && late->peer() == m.rank);
  }
}

// More large messages than a ring holds, received in the opposite order.
void many_large(const Member& m) {
  const int many = 3 * 8;
  const std::size_t n = 300'000;
  std::vector<TransferPtr> all;
  std::vector<Bytes> got(m.world * many, Bytes(n));
  const Bytes mine = pattern(n, m.rank);
  for (int i = 0; i < many; ++i)
    for (Rank r = 0; r < m.world; ++r)
      if (r != m.rank) all.push_back(m.box.send(r, envelope(n, i), mine.data()));
  for (int i = many; i-- > 0;)
    for (Rank r = 0; r < m.world; ++r)
      if (r != m.rank) all.push_back(m.box.receive(r, envelope(n, i), got[r * many + i].data()));
  for (const auto& it : all) m.wait(it);
  for (Rank r = 0; r < m.world; ++r)
    for (int i = 0; r != m.rank && i < many; ++i) check(got[r * many + i] == pattern(n, r));
}

// Receives from any source are fair: rank 1's flood does not delay rank 2's only message.
void any_source_is_fair(const Member& m) {
  constexpr int kFlood = 3000;
  const uint32_t tag = 9;
  int word = m.rank;
  std::byte* const at = reinterpret_cast<std::byte*>(&word);
  std::vector<TransferPtr> sent;
  if (m.rank == 1)
    for (int i = 0; i < kFlood; ++i) sent.push_back(m.box.send(0, envelope(4, tag), at));
  if (m.rank == 2) m.wait(m.box.send(0, envelope(4, tag), at));
  if (m.rank != 0) {
    for (const auto& it : sent) m.wait(it);
    return;
  }
  int behind = -1, seen = 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (int i = 0; i < kFlood + 1; ++i) {
    const auto received = m.box.receive(std::nullopt, envelope(4, tag), at);
    m.wait(received);
    check(word == received->peer() && (word == 1 || word == 2));
    if (word == 2) behind = i, ++seen;
  }
  check(seen == 1 && behind <= 5, text("it came after ", behind));
}

// Receives from one rank and from any source match messages in the order in which they were posted.
void in_posted_order(const Member& m) {
  for (const bool any_source_first : {true, false}) {
    int words[2] = {1, 2};
    std::byte* const at[2] = {reinterpret_cast<std::byte*>(words),
                              reinterpret_cast<std::byte*>(words + 1)};
    TransferPtr both[2];
    int go = 0;
    std::byte* const ready = reinterpret_cast<std::byte*>(&go);
    if (m.rank == 1) {
      m.wait(m.box.receive(0, envelope(4, 5), ready));
      for (std::byte* const word : at) m.wait(m.box.send(0, envelope(4, 4), word));
      continue;
    }
    for (int i = 0; i < 2; ++i) {
      const bool any_source = (i == 0) == any_source_first;
      words[i] = 0;
      both[i] =
          m.box.receive(any_source ? std::nullopt : std::optional<Rank>(1), envelope(4, 4), at[i]);
    }
    m.wait(m.box.send(1, envelope(4, 5), ready));
    for (const auto& it : both) m.wait(it);
    check(words[0] == 1 && words[1] == 2);
  }
}

// Rank 1 waits for rank 2 and rank 2 for rank 0, which first sends rank 1 much more than a ring
// holds and waits for the end of those sends.
void progress_while_waiting(const Member& m) {
  constexpr int kMany = 3000;
  const Bytes data = pattern(1000, 3);
  Bytes got(1000);
  const Rank next = (m.rank + 2) % 3;
  if (m.rank == 0)
    for (int i = 0; i < kMany; ++i) m.wait(m.box.send(1, envelope(1000, 1), data.data()));
  if (m.rank != 0) m.wait(m.box.receive((m.rank + 1) % 3, envelope(1000, 2), got.data()));
  if (m.rank != 1) m.wait(m.box.send(next, envelope(1000, 2), data.data()));
  for (int i = 0; m.rank == 1 && i < kMany; ++i)
    m.wait(m.box.receive(0, envelope(1000, 1), got.data()));
  check(m.rank == 0 || got == data);
}

// Each of several threads waits for one transfer; one more thread progresses all other transfers.
void several_threads(const Member& m) {
  constexpr int kThreads = 4, kRounds = 30;
  std::atomic<bool> stop{false};
  int word = 0;
  const Rank other = 1 - m.rank;
  std::vector<std::jthread> threads;
  const auto pending = m.box.receive(other, envelope(4, 99), reinterpret_cast<std::byte*>(&word));
  std::jthread server([&] { m.wait([&] { return stop.load(); }); });
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds; ++i) {
        const std::size_t n = i % 3 == 0 ? 400'000 : 100;
        const Bytes data = pattern(n, 2 * t + m.rank);
        Bytes got(n);
        const auto sent = m.box.send(other, envelope(n, t), data.data());
        const auto received = m.box.receive(other, envelope(n, t), got.data());
        while (t == 0 && !received->done()) std::this_thread::yield();  // the server moves it
        m.wait(received);
        m.wait(sent);
        if (got != pattern(n, 2 * t + other)) std::abort();
      }
    });
  threads.clear();
  const auto last = m.box.send(other, envelope(4, 99), reinterpret_cast<const std::byte*>(&other));
  m.wait(last);
  m.wait(pending);
  check(word == m.rank);
  stop = true;
  m.box.wake();
}

double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  const auto seconds = [](const timeval& t) { return t.tv_sec + t.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void waits_without_cpu(const Member& m) {
  const std::size_t n = 1 << 20;
  Bytes data(n);
  if (m.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const double before = cpu_seconds();
  m.wait(m.rank == 0 ? m.box.send(1, envelope(n), data.data())
                     : m.box.receive(0, envelope(n), data.data()));
  const double used = cpu_seconds() - before;
  check(used < 0.15, text("waiting took ", used, " s of a core"));
}

// First quartile of the ms until messages reach a sleeping rank 1; returns 0 on the sender, rank 0.
double wake_up_ms(const Member& m) {
  constexpr int kRounds = 21;
  std::vector<double> late;
  Clock::rep sent = 0;
  std::byte* const at = reinterpret_cast<std::byte*>(&sent);
  for (int i = 0; i < kRounds; ++i) {
    if (m.rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
      sent = Clock::now().time_since_epoch().count();  // one clock for all processes of a host
      m.wait(m.box.send(1, envelope(sizeof sent), at));
    } else {
      m.wait(m.box.receive(0, envelope(sizeof sent), at));
      const Clock::duration took = Clock::now().time_since_epoch() - Clock::duration(sent);
      late.push_back(std::chrono::duration<double, std::milli>(took).count());
    }
  }
  std::sort(late.begin(), late.end());
  return late.empty() ? 0 : late[kRounds / 4];
}

// A message wakes a sleeping receiver before its backoff ends (a quarter end within 2.7 ms). There
// are several tries, as other processes may occupy the cores for a while.
void wakes_receiver(const Member& m) {
  constexpr int kTries = 10;
  double took = 0;
  std::byte* const at = reinterpret_cast<std::byte*>(&took);
  for (int i = 0; i < kTries; ++i) {
    took = wake_up_ms(m);
    m.wait(m.rank == 1 ? m.box.send(0, envelope(sizeof took), at)
                       : m.box.receive(1, envelope(sizeof took), at));
    if (took < 0.5) return;
  }
  check(false, text("woken after ", took, " ms"));
}

struct Case {
  const char* name;
  int world;
  Body body;
  Rank killed = -1;  // if set, ranks must be processes
};

bool forks() { return std::getenv("NO_FORK") == nullptr; }

void run(const Case& it) {
  const auto begin = Clock::now();
  if (it.killed < 0) run_threads(it.world, it.body);
  if (forks()) run_processes(it.world, it.body, it.killed);
  const std::chrono::duration<double> took = Clock::now() - begin;
  const bool skipped = it.killed >= 0 && !forks();
  std::printf("%-32s %d ranks, %.2f s%s\n", it.name, it.world, took.count(),
              skipped ? ": SKIPPED, it needs processes" : "");
  std::fflush(stdout);
}

}  // namespace
}  // namespace pycollect::ipc

int main(int argc, char** argv) {
  using namespace pycollect::ipc;
  const int programs = argc > 1 ? std::atoi(argv[1]) : 12;
  run({"both send first", 2, both_send_first});
  run({"other tag first", 2, other_tag_first});
  for (const int world : {1, 3}) run({"to self", world, to_self});
  run({"many large", 3, many_large});
  run({"progress despite stalled peer", 3, progress_despite_stalled_peer});
  run({"fragments in order", 2, fragments_in_order});
  run({"any source is fair", 3, any_source_is_fair});
  run({"in posted order", 2, in_posted_order});
  run({"progress while waiting", 3, progress_while_waiting});
  run({"mismatched", 2, mismatched});
  run({"many mismatched", 2, many_mismatched});
  run({"several threads", 2, several_threads});
  run({"waits without cpu", 2, waits_without_cpu});
  run({"wakes receiver", 2, wakes_receiver});
  run({"late peer", 2, late_peer});
  run({"killed peer", 3, killed_peer, 1});
  run({"receives after sender left", 3, receives_after_sender_left});
  run({"any source despite departed", 3, any_source_despite_departed});
  for (const auto& body : kInvalidRecords) run({"invalid record", 2, body});
  for (int i = 0; i < 10; ++i) run({"message deep in the ring", 2, message_deep_in_the_ring});
  for (int seed = 0; seed < programs; ++seed)
    run({"random program", 2 + seed % 5, [&](const Member& m) { run_program(m, seed); }});
}
