// Messages that do not match their receive, and messages of a rank that is late, dies or leaves.
#pragma once
#include <csignal>

#include "mailbox_ranks.h"

namespace pycollect::ipc {

template <class F>
std::string refusal(const F& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  throw std::logic_error("was not refused");
}

// Sizes or dtypes differ: the receiver's memory is not written, and later messages arrive intact.
inline void mismatched(const Member& m) {
  struct Case {
    Envelope sent, wanted;
  };
  for (const Case& it : {Case{envelope(1 << 20, 3), envelope(1 << 19, 3)},
                         Case{envelope(1 << 19, 3), envelope(1 << 20, 3)},
                         Case{envelope(100'000, 3, 1), envelope(100'000, 3, 9)},
                         Case{envelope(64), envelope(65)}, Case{envelope(100'000), envelope(8)},
                         Case{envelope(0), envelope(1)}, Case{envelope(8), envelope(100'000)}}) {
    const Bytes data = pattern(it.sent.bytes, 1), before = pattern(it.wanted.bytes, 2);
    std::string why;
    if (m.rank == 0) {
      const auto sent = m.box.send(1, it.sent, data.data());
      if (it.sent.bytes < 1000)
        m.wait(sent);
      else
        why = refusal([&] { m.wait(sent); });
    } else {
      Bytes into = before;
      const auto received = m.box.receive(0, it.wanted, into.data());
      why = refusal([&] { m.wait(received); });
      check(into == before, "the receiver's memory was written");
    }
    for (const uint64_t bytes : {it.sent.bytes, it.wanted.bytes})
      check(why.empty() || why.find(text(bytes, " bytes of ")) != why.npos, why);
    int word = 5;
    std::byte* const at = reinterpret_cast<std::byte*>(&word);
    m.wait(m.rank == 0 ? m.box.send(1, envelope(4, 3), at) : m.box.receive(0, envelope(4, 3), at));
    check(m.box.idle());
  }
}

// More NACKs than the ring has room for, while the sender does not poll yet: every NACK arrives,
// though the receiver has nothing else to wait for.
inline void many_mismatched(const Member& m) {
  constexpr int kMany = 50;
  const Bytes data = pattern(1 << 17, 1);
  Bytes into(1 << 16);
  std::vector<TransferPtr> all;
  for (int i = 0; i < kMany; ++i)
    all.push_back(m.rank == 0 ? m.box.send(1, envelope(data.size()), data.data())
                              : m.box.receive(0, envelope(into.size()), into.data()));
  if (m.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  for (const TransferPtr& transfer : all) refusal([&] { m.wait(transfer); });
  check(m.box.idle());
}

inline void late_peer(const Member& m) {
  if (m.rank == 1) {
    while (!m.group.has_reached(0, 1)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return;
  }
  int word = 3;
  std::byte* const at = reinterpret_cast<std::byte*>(&word);
  const auto received = m.box.receive(1, envelope(4), at),
             other = m.box.receive(1, envelope(4, 2), at);
  try {
    m.box.wait(*received, m.context(std::chrono::milliseconds(200)));
    check(false, "no Timeout");
  } catch (const Timeout&) {
  }
  check(other->done() && m.box.idle() && word == 3, "a pending transfer has not failed");
  try {
    m.box.send(1, envelope(4), at);
    check(false, "a broken group accepts a send");
  } catch (const Timeout&) {
  }
  m.group.advance(1);
}

// Rank 1 dies in the middle of a message of 64 MiB. A rank that waits for a live rank
// fails only once that rank does.
inline void killed_peer(const Member& m) {
  const std::size_t n = 64 << 20;
  Bytes data(n);
  if (m.rank == 1) {
    const auto sent = m.box.send(0, envelope(n), data.data());
    for (const auto begin = Clock::now(); Clock::now() - begin < std::chrono::milliseconds(20);)
      m.box.progress();
    kill(getpid(), SIGKILL);
  }
  const auto received = m.box.receive(m.rank == 0 ? 1 : 0, envelope(n), data.data());
  if (m.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto begin = Clock::now();
  try {
    m.wait(received);
    check(false, "no PeerLost");
  } catch (const PeerLost& error) {
    check(std::string(error.what()).find("rank 1") != std::string::npos, error.what());
  }
  check(Clock::now() - begin < std::chrono::seconds(2), "detected late");
}

// A receive from any source does not depend on a peer that has left, unless every peer has left.
inline void any_source_despite_departed(const Member& m) {
  int word = m.rank;
  std::byte* const at = reinterpret_cast<std::byte*>(&word);
  if (m.rank == 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    m.wait(m.box.send(0, envelope(4), at));
  }
  if (m.rank != 0) return;
  m.wait(m.box.receive(std::nullopt, envelope(4), at));
  check(word == 2);
  try {
    m.wait(m.box.receive(std::nullopt, envelope(4), at));
    check(false, "no PeerLost");
  } catch (const PeerLost&) {
  }
}

// A message that a rank sent before it left is still received.
inline void receives_after_sender_left(const Member& m) {
  Bytes small = pattern(100, 1), large = pattern(900'000, 2), got(100), more(900'000);
  if (m.rank != 0) {
    const auto first = m.box.send(0, envelope(small.size(), 1), small.data());
    const auto second = m.box.send(0, envelope(large.size(), 2), large.data());
    m.wait(first);
    return m.wait(second);
  }
  m.wait(m.box.receive(1, envelope(large.size(), 2), more.data()));
  m.wait(m.box.receive(2, envelope(large.size(), 2), more.data()));
  check(more == large);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  for (int i = 0; i < 2; ++i)
    m.wait(m.box.receive(std::nullopt, envelope(small.size(), 1), got.data()));
  check(got == small);
}

// Fragments that do not fit into the ring are not overtaken by smaller ones of a later message.
inline void fragments_in_order(const Member& m) {
  const std::size_t sizes[] = {100'000, 4 << 20, 20'000};
  std::vector<Bytes> data;
  for (const std::size_t n : sizes) data.push_back(m.rank == 0 ? pattern(n, n % 251) : Bytes(n));
  const auto reach = [&](uint64_t wanted) {
    m.group.await(1 - m.rank, wanted, m.context(std::chrono::seconds(20)));
  };
  std::vector<TransferPtr> all;
  if (m.rank == 1) reach(1);
  for (Bytes& it : data)
    all.push_back(m.rank == 0 ? m.box.send(1, envelope(it.size()), it.data())
                              : m.box.receive(0, envelope(it.size()), it.data()));
  m.group.advance(1);
  if (m.rank == 0) {
    reach(1);
    while (m.box.progress()) continue;
    check(all[0]->done() && all[1]->moved() > 500'000 && !all[1]->done(), "the ring is not full");
    check(all[2]->moved() == 0, "a later message has overtaken");
    m.group.advance(2);
  } else {
    reach(2);
  }
  for (const auto& it : all) m.wait(it);
  for (const Bytes& it : data) check(it == pattern(it.size(), it.size() % 251));
}

// Rank 1 sends rank 0 more large messages than a ring holds and makes no more progress: messages
// from rank 2, and from rank 0 to itself, still arrive.
inline void progress_despite_stalled_peer(const Member& m) {
  const std::size_t n = 300'000;
  const Bytes mine = pattern(n, m.rank);
  std::vector<TransferPtr> stopped;
  std::vector<Bytes> got(8, Bytes(n));
  const auto reach = [&](Rank r, uint64_t wanted) {
    while (!m.group.has_reached(r, wanted)) std::this_thread::yield();
  };
  if (m.rank == 1) {
    for (const Bytes& it : got) stopped.push_back(m.box.send(0, envelope(it.size()), mine.data()));
    m.group.advance(1);
    reach(0, 1);
  } else if (m.rank == 2) {
    m.wait(m.box.send(0, envelope(n), mine.data()));
  } else {
    reach(1, 1);
    for (Bytes& it : got) stopped.push_back(m.box.receive(1, envelope(n), it.data()));
    Bytes other(n), own(n);
    m.wait(m.box.receive(2, envelope(n), other.data()));
    const auto sent = m.box.send(0, envelope(n), mine.data());
    m.wait(m.box.receive(0, envelope(n), own.data()));
    m.wait(sent);
    check(other == pattern(n, 2) && own == mine);
    m.group.advance(1);
  }
  for (const auto& it : stopped) m.wait(it);
  for (const Bytes& it : got) check(m.rank != 0 || it == pattern(n, 1));
}

}  // namespace pycollect::ipc
