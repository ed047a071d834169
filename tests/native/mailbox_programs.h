// Random programs of messages, which end if sends never block: every message has the times of its
// send, of posting its receive and of waiting for it, and each rank makes its calls in the order of
// these times.
#pragma once
#include <algorithm>
#include <map>
#include <random>

#include "mailbox_ranks.h"

namespace pycollect::ipc {

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
    m.from = below(world);
    m.to = below(world);
    m.tag = below(3);
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

// Every byte depends on its sender and on its position in the message.
inline std::byte payload(const Message& m, std::size_t i) {
  return static_cast<std::byte>(m.from * 31 + (m.tag == kAnyTag ? 0 : m.bytes) + i * 7 + (i >> 8));
}

class Program {
 public:
  Program(const Member& member, uint64_t seed)
      : member_(member), messages_(random_messages(member.world, seed)) {
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      const Message& m = messages_[i];
      if (m.from == member.rank) steps_.emplace(m.sent, [this, i] { send(i); });
      if (m.to != member.rank) continue;
      steps_.emplace(m.posted, [this, i] { post_receive(i); });
      steps_.emplace(m.waited, [this, i] { wait(i); });
    }
  }
  void run() {
    data_.resize(messages_.size());
    got_.resize(messages_.size());
    received_.resize(messages_.size());
    for (const auto& [time, step] : steps_) step();
    for (const auto& sent : sent_) member_.wait(sent);
    check(member_.box.idle());
  }

 private:
  void send(std::size_t i) {
    const Message& m = messages_[i];
    data_[i].resize(m.bytes);
    for (std::size_t b = 0; b < m.bytes; ++b) data_[i][b] = payload(m, b);
    sent_.push_back(member_.box.send(m.to, {m.bytes, 1, m.tag}, data_[i].data()));
  }
  void post_receive(std::size_t i) {
    const Message& m = messages_[i];
    const auto from = m.tag == kAnyTag ? std::nullopt : std::optional<Rank>(m.from);
    got_[i].resize(m.bytes);
    received_[i] = member_.box.receive(from, {m.bytes, 1, m.tag}, got_[i].data());
  }
  void wait(std::size_t i) {
    Message m = messages_[i];
    member_.wait(received_[i]);
    if (m.tag == kAnyTag) m.from = received_[i]->peer();
    check(received_[i]->peer() == m.from);
    for (std::size_t b = 0; b < m.bytes; ++b)
      if (got_[i][b] != payload(m, b)) check(false, text("byte ", b, " of message ", i));
  }

  const Member& member_;
  std::vector<Message> messages_;
  std::multimap<double, std::function<void()>> steps_;
  std::vector<std::vector<std::byte>> data_, got_;
  std::vector<TransferPtr> sent_, received_;
};

inline void run_program(const Member& member, uint64_t seed) { Program(member, seed).run(); }

}  // namespace pycollect::ipc
