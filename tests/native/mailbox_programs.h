// A rank with a mailbox, and random programs of messages, which end if sends never block: every
// message has the times of its send, of posting its receive and of waiting for it, and each rank
// makes its calls in the order of these times.
#pragma once
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "../../csrc/send_recv/mailbox.h"
#include "ranks.h"

namespace pycollect::ipc {

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
inline Bytes pattern(std::size_t bytes, uint64_t seed) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>(seed * 31 + i * 7 + (i >> 8));
  return data;
}

struct Message {
  Rank from = 0, to = 0;
  uint32_t tag = 0;
  std::size_t bytes = 0;
  double sent = 0, posted = 0, waited = 0;
};

inline constexpr uint32_t kAnyTag = 1000;  // received from any source; all of one size

inline std::vector<Message> random_messages(int world, uint64_t seed) {
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

inline void run_program(const Member& me, uint64_t seed) {
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

}  // namespace pycollect::ipc
