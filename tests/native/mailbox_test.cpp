// Sends and receives between ranks: matching, progress, waits, many mismatches, departed peers, and
// random programs of messages: mailbox_test [number of programs].
#include "../../csrc/send_recv/mailbox.h"

#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "../../csrc/send_recv/mail_area.h"
#include "ranks.h"

namespace pycollect::ipc {
namespace {

using Bytes = std::vector<std::byte>;

struct Member {
  Group& group;
  Mailbox& box;
  Rank rank, world;

  OpContext context(std::chrono::milliseconds most = 60s) const {
    return {"recv", 7, Clock::now() + most};
  }
  void wait(const TransferPtr& transfer) const {
    box.wait(
        {[&] { return transfer->done(); }, [&] { return box.missing(*transfer); }, transfer.get()},
        context());
    transfer->rethrow();
  }
  void wait_all(const std::vector<TransferPtr>& all) const {
    for (const TransferPtr& it : all) wait(it);
  }
  TransferPtr send(Rank to, const Bytes& data, uint32_t tag = 0) const {
    return post(to, {data.size(), 1, tag}, const_cast<std::byte*>(data.data()), false);
  }
  TransferPtr receive(std::optional<Rank> from, Bytes& into, uint32_t tag = 0) const {
    return post(from.value_or(kAnySource), {into.size(), 1, tag}, into.data(), true);
  }
  TransferPtr post(Rank peer, const Envelope& what, std::byte* buffer, bool receives) const {
    const auto transfer = std::make_shared<Transfer>(peer, what, buffer, receives);
    box.post(transfer);
    return transfer;
  }
};

// Every byte depends on the seed and on its position.
Bytes pattern(std::size_t bytes, uint64_t seed) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>(seed * 31 + i * 7 + (i >> 8));
  return data;
}

Bytes word(int value) {
  Bytes bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}
void send_word(const Member& m, Rank to, int value, uint32_t tag = 0) {
  m.wait(m.send(to, word(value), tag));
}
int receive_word(const Member& m, std::optional<Rank> from, uint32_t tag = 0) {
  Bytes bytes(sizeof(int));
  m.wait(m.receive(from, bytes, tag));
  int value = 0;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

// Receives from any source are fair: rank 1's flood does not delay rank 2's only message.
void any_source_is_fair(const Member& m) {
  constexpr int kFlood = 3000;
  if (m.rank == 0) {
    int behind = -1;
    std::this_thread::sleep_for(50ms);
    for (int i = 0; i < kFlood + 1; ++i)
      if (receive_word(m, std::nullopt) == 2) behind = i;
    expect(0 <= behind && behind <= 5, text("it came after ", behind));
  } else {
    const Bytes mine = word(m.rank);
    std::vector<TransferPtr> sent;
    for (int i = 0; i < (m.rank == 1 ? kFlood : 1); ++i) sent.push_back(m.send(0, mine));
    m.wait_all(sent);
  }
}

// Receives from one rank and from any source match messages in the order in which they were posted.
void in_posted_order(const Member& m) {
  for (const bool any_source_first : {true, false}) {
    if (m.rank == 1) {
      receive_word(m, 0, 5);
      for (const int i : {1, 2}) send_word(m, 0, i);
      continue;
    }
    Bytes first(sizeof(int)), second(sizeof(int));
    const std::optional<Rank> one = 1, any = std::nullopt;
    const std::vector<TransferPtr> both = {m.receive(any_source_first ? any : one, first),
                                           m.receive(any_source_first ? one : any, second)};
    send_word(m, 1, 0, 5);
    m.wait_all(both);
    expect(first == word(1) && second == word(2), "another order");
  }
}

// Rank 1 waits for rank 2 and rank 2 for rank 0, which first sends rank 1 much more than a ring
// holds and waits for the end of those sends.
void progress_while_waiting(const Member& m) {
  constexpr int kMany = 3000;
  const Bytes data = pattern(1000, 3);
  Bytes got(1000);
  for (int i = 0; m.rank == 0 && i < kMany; ++i) m.wait(m.send(1, data, 1));
  if (m.rank != 0) m.wait(m.receive((m.rank + 1) % 3, got, 2));
  if (m.rank != 1) m.wait(m.send((m.rank + 2) % 3, data, 2));
  for (int i = 0; m.rank == 1 && i < kMany; ++i) m.wait(m.receive(0, got, 1));
  expect(m.rank == 0 || got == data, "other data");
}

// Rank 1 sends rank 0 more large messages than a ring holds and makes no more progress: messages
// from rank 2, and from rank 0 to itself, still arrive.
void progress_despite_stalled_peer(const Member& m) {
  const std::size_t n = 300'000;
  const Bytes mine = pattern(n, m.rank);
  std::vector<Bytes> got(10, Bytes(n));
  const auto reach = [&](Rank r) {
    while (!m.group.has_reached(r, 1)) std::this_thread::yield();
  };
  if (m.rank == 2) return m.wait(m.send(0, mine));
  std::vector<TransferPtr> stalled;
  if (m.rank == 0) reach(1);
  for (int i = 0; i < 8; ++i)
    stalled.push_back(m.rank == 1 ? m.send(0, mine) : m.receive(1, got[i]));
  if (m.rank == 0) m.wait_all({m.receive(2, got[8]), m.send(0, mine), m.receive(0, got[9])});
  m.group.advance(1);
  if (m.rank == 1) reach(0);
  m.wait_all(stalled);
  for (int i = 0; m.rank == 0 && i < 10; ++i)
    expect(got[i] == pattern(n, i == 9 ? 0 : i == 8 ? 2 : 1), "other data");
}

// Each of several threads waits for one transfer; one more thread progresses all other transfers.
void several_threads(const Member& m) {
  const Rank other = 1 - m.rank;
  std::atomic<bool> stop{false};
  Bytes last(sizeof(int));
  const auto pending = m.receive(other, last, 99);
  std::jthread server([&] {
    m.box.wait({[&] { return stop.load(); }, [] { return std::vector<Rank>(); }}, m.context());
  });
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 30; ++i) {
        const std::size_t n = i % 3 == 0 ? 400'000 : 100;
        const Bytes data = pattern(n, 2 * t + m.rank);
        Bytes got(n);
        const auto sent = m.send(other, data, t), received = m.receive(other, got, t);
        while (t == 0 && !received->done()) std::this_thread::yield();  // the server moves it
        m.wait_all({received, sent});
        expect(got == pattern(n, 2 * t + other), "other data");
      }
    });
  threads.clear();
  send_word(m, other, other, 99);
  m.wait(pending);
  expect(last == word(m.rank), "another word");
  stop = true;
  m.box.wake();
}

// A receiver that sleeps uses no core, and a message wakes it before its backoff ends: a quarter
// end within 2.7 ms. There are several tries, as other processes may occupy the cores for a while.
void wakes_receiver(const Member& m) {
  const auto cpu_time = [] {
    rusage usage = {};
    getrusage(RUSAGE_THREAD, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1s +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1us;
  };
  for (int tries = 10;; --tries) {
    std::vector<int> all;  // microseconds
    const auto before = cpu_time();
    for (int i = 0; i < 21; ++i) {
      const auto now = [] {  // one clock for all processes of a host
        return static_cast<int>(Clock::now().time_since_epoch() / 1us % 1'000'000'000);
      };
      if (m.rank == 0) std::this_thread::sleep_for(40ms);
      if (m.rank == 0) send_word(m, 1, now());
      if (m.rank == 1) all.push_back(now() - receive_word(m, 0));
    }
    const auto used = cpu_time() - before;
    std::sort(all.begin(), all.end());
    const int late = m.rank == 0 ? 0 : all[5];
    const bool good = m.rank == 0 ? receive_word(m, 1) : late < 500 && used < 250ms;
    if (m.rank == 1) send_word(m, 0, good);
    if (good) return;
    expect(tries > 0, text("woken late (", late, " us), or used a core (", used / 1ms, " ms)"));
  }
}

// More NACKs than the ring has room for, while the sender does not poll yet: every NACK arrives,
// though the receiver has nothing else to wait for. The receiver's memory is not written.
void many_mismatched(const Member& m) {
  const Bytes data = pattern(1 << 17, 1);
  Bytes into(1 << 16);
  std::vector<TransferPtr> all;
  for (int i = 0; i < 50; ++i) all.push_back(m.rank == 0 ? m.send(1, data) : m.receive(0, into));
  if (m.rank == 0) std::this_thread::sleep_for(100ms);
  for (const TransferPtr& transfer : all) {
    const std::string why = refusal([&] { m.wait(transfer); });
    for (const std::size_t n : {data.size(), into.size()}) expect_part(why, text(n, " bytes of "));
  }
  expect(m.box.idle() && into == Bytes(1 << 16), "pending, or written");
}

// A receive from any source does not depend on a peer that has left, unless every peer has left.
void any_source_despite_departed(const Member& m) {
  if (m.rank == 2) std::this_thread::sleep_for(100ms), send_word(m, 0, 2);
  if (m.rank != 0) return;
  expect(receive_word(m, std::nullopt) == 2, "another word");
  expect_part(refusal([&] { receive_word(m, std::nullopt); }), "PeerLost: ");
}

// The message lies deep in the ring of a rank that has left, while other threads of the receiver
// compete for the mailbox's lock, and a signal's handler stops the one that holds it.
void message_deep_in_the_ring(const Member& m) {
  for (int i = 0; m.rank == 1 && i <= 1500; ++i) send_word(m, 0, 1, i == 1500 ? 2 : 1);
  if (m.rank == 1) return;
  while (m.group.rank_state(1).left.load() == 0) std::this_thread::yield();
  Bytes got(sizeof(int));
  const auto received = m.receive(1, got, 2);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&](const std::stop_token& end) {
      while (!end.stop_requested()) m.box.hello(m.rank);
    });
  std::this_thread::sleep_for(5ms);
  std::signal(SIGUSR1, [](int) { std::this_thread::sleep_for(20ms); });
  for (std::jthread& thread : threads) pthread_kill(thread.native_handle(), SIGUSR1);
  m.wait(received);
  expect(got == word(1), "another word");
}

// Random programs of messages, which end if sends never block: every message has the times of its
// send, of posting its receive and of waiting for it, and each rank makes its calls in their order.
struct Message {
  Rank from = 0, to = 0;
  uint32_t tag = 0;
  std::size_t bytes = 0;
  double sent = 0, posted = 0, waited = 0;
};

constexpr uint32_t kAnyTag = 1000;  // received from any source; all of one size

std::vector<Message> random_messages(int world, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto real = [&] { return std::uniform_real_distribution<double>(0, 1)(random); };
  const auto below = [&](int n) { return static_cast<int>(real() * n); };
  const std::size_t any_bytes = below(2) == 0 ? 100 : 50'000;
  std::vector<Message> all(150);
  for (Message& m : all) {
    m.from = below(world), m.to = below(world), m.tag = below(3);
    const double kind = real();
    m.bytes = kind < 0.1   ? 0
              : kind < 0.7 ? static_cast<std::size_t>(real() * 20'000)
                           : static_cast<std::size_t>(std::exp2(real() * 21.6));
    if (below(5) == 0) m.tag = kAnyTag, m.bytes = any_bytes;
    m.sent = real();
    m.waited = m.sent + real() * (1.5 - m.sent);
    m.posted = m.waited * real();
  }
  // Messages of one pair and tag are sent, requested and waited for in the same order.
  std::map<std::tuple<Rank, Rank, uint32_t>, std::vector<Message*>> alike;
  for (Message& m : all) alike[{m.tag == kAnyTag ? 0 : m.from, m.to, m.tag}].push_back(&m);
  for (auto& [key, group] : alike)
    for (double Message::* time : {&Message::sent, &Message::posted, &Message::waited}) {
      std::vector<double> times;
      for (const Message* m : group) times.push_back(m->*time);
      std::sort(times.begin(), times.end());
      for (std::size_t i = 0; i < times.size(); ++i) group[i]->*time = times[i];
    }
  return all;
}

void run_program(const Member& me, uint64_t seed) {
  const std::vector<Message> messages = random_messages(me.world, seed);
  struct State {
    Bytes data, got;
    TransferPtr sent, received;
  };
  std::vector<State> states(messages.size());
  std::multimap<double, std::function<void()>> steps;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& m = messages[i];
    State& state = states[i];
    const bool any = m.tag == kAnyTag;
    const auto content = [&m, any](Rank from) {
      return pattern(m.bytes, from + 8 * (any ? 0 : m.bytes));
    };
    if (m.from == me.rank)
      steps.emplace(m.sent, [&, content] {
        state.sent = me.send(m.to, state.data = content(m.from), m.tag);
      });
    if (m.to != me.rank) continue;
    steps.emplace(m.posted, [&, any] {
      state.got.resize(m.bytes);
      state.received = me.receive(any ? std::nullopt : std::optional(m.from), state.got, m.tag);
    });
    steps.emplace(m.waited, [&, any, content, i] {
      me.wait(state.received);
      const Rank from = state.received->peer();
      expect((any || from == m.from) && state.got == content(from), text("message ", i));
    });
  }
  for (const auto& [time, step] : steps) step();
  for (const State& state : states)
    if (state.sent) me.wait(state.sent);
  expect(me.box.idle(), "a transfer is pending");
}

void run_case(const char* name, int world, const std::function<void(const Member&)>& body) {
  GroupSettings settings = quick_settings(60s);
  settings.mailbox_bytes = MailArea::bytes(world);
  settings.mailbox_header_bytes = MailArea::header_bytes(world);
  const Body with_mailbox = [&](RankContext& me) {
    Group group(me.store, me.rank, world, me.settings);
    Mailbox box(group);
    body({group, box, me.rank, world});
    return std::string("right");
  };
  std::printf("%s, %d ranks\n", name, world);
  std::fflush(stdout);
  expect_each(run_threads(world, settings, with_mailbox), "right");
  if (forks()) expect_each(run(world, settings, with_mailbox), "right");
}

}  // namespace
}  // namespace pycollect::ipc

int main(int argc, char** argv) {
  using namespace pycollect::ipc;
  const int programs = argc > 1 ? std::atoi(argv[1]) : 12;
  run_case("progress despite stalled peer", 3, progress_despite_stalled_peer);
  run_case("any source is fair", 3, any_source_is_fair);
  run_case("in posted order", 2, in_posted_order);
  run_case("progress while waiting", 3, progress_while_waiting);
  run_case("many mismatched", 2, many_mismatched);
  run_case("several threads", 2, several_threads);
  run_case("wakes receiver", 2, wakes_receiver);
  run_case("any source despite departed", 3, any_source_despite_departed);
  for (int i = 0; i < 10; ++i) run_case("message deep in the ring", 2, message_deep_in_the_ring);
  for (int seed = 0; seed < programs; ++seed)
    run_case("random program", 1 + seed % 5, [=](const Member& m) { run_program(m, seed); });
}
