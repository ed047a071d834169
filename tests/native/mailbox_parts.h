// Sends whose bytes become available in parts (send_partly and supply).
#pragma once
#include "mailbox_faults.h"

namespace pycollect::ipc {

inline constexpr std::size_t kPartlyBytes = (3 << 20) + 5;

inline void wait_until(const Member& m, const std::function<bool()>& holds) {
  m.wait(holds);
  check(holds());
}

// A send moves all available bytes, whatever other messages go to the same rank meanwhile, and does
// not read bytes that are not available yet.
inline void sent_in_parts(const Member& m) {
  const Bytes data = pattern(kPartlyBytes, 3), other = pattern(300'000, 4);
  const std::size_t parts[] = {0, 1, 63, 64, 70'001, 1 << 20, kPartlyBytes - 1, kPartlyBytes};
  Bytes mine(kPartlyBytes), got(kPartlyBytes), other_received(other.size());
  const bool sends = m.rank == 0, receives = m.rank == m.world - 1;
  TransferPtr sent, received;
  if (sends) sent = m.box.send_partly(m.world - 1, envelope(kPartlyBytes), mine.data(), 0);
  if (receives) received = m.box.receive(0, envelope(kPartlyBytes), got.data());
  uint32_t tag = 1;
  for (const std::size_t available : parts) {
    std::vector<TransferPtr> all;
    int word = static_cast<int>(tag);
    std::byte* const at = reinterpret_cast<std::byte*>(&word);
    if (sends) {
      std::memcpy(mine.data(), data.data(), available);
      m.box.supply(*sent, available);
      all.push_back(m.box.send(m.world - 1, envelope(other.size(), tag), other.data()));
      all.push_back(m.box.send(m.world - 1, envelope(4, tag), at));
    }
    if (receives) {
      if (available != 0) wait_until(m, [&] { return received->moved() >= available; });
      check(received->moved() == available, text(received->moved(), " bytes, not ", available));
      check(std::equal(got.begin(), got.begin() + available, data.begin()));
      m.wait(m.box.receive(0, envelope(other.size(), tag), other_received.data()));
      all.push_back(m.box.receive(0, envelope(4, tag), at));
    }
    for (const auto& it : all) m.wait(it);
    ++tag;
    if (receives) check(other_received == other && word == static_cast<int>(tag) - 1);
  }
  if (sends) m.wait(sent), check(sent->moved() == kPartlyBytes);
  if (receives) m.wait(received), check(got == data);
  check(m.box.idle());
}

// The rest of a send never becomes available: neither transfer completes.
inline void incomplete_parts(const Member& m) {
  const std::size_t half = 1 << 20;
  const Bytes data = pattern(half, 3);
  Bytes got(kPartlyBytes);
  const auto transfer = m.rank == 0
                            ? m.box.send_partly(1, envelope(kPartlyBytes), data.data(), half)
                            : m.box.receive(0, envelope(kPartlyBytes), got.data());
  wait_until(m, [&] { return transfer->moved() == half; });
  if (m.rank == 0) {
    while (!m.group.has_reached(1, 1)) std::this_thread::yield();
    m.group.abort("its device has failed");
  }
  m.group.advance(1);
  try {
    m.wait(transfer);
    check(false, "nothing was thrown");
  } catch (const CollectiveError& error) {
    check(std::string(error.what()).find("its device has failed") != std::string::npos);
  }
  check(transfer->done() && transfer->moved() == half && m.box.idle());
  if (m.rank == 0) m.box.supply(*transfer, kPartlyBytes);  // has no effect
  check(!m.box.progress() && transfer->moved() == half);
}

inline void invalid_parts(const Member& m) {
  const Bytes data(kPartlyBytes);
  std::string why = refusal([&] { m.box.send_partly(0, envelope(100), data.data(), 0); });
  check(why.starts_with("a message of 100 bytes cannot be sent in parts"), why);
  why = refusal([&] { m.box.send_partly(0, envelope(100'000), data.data(), 100'001); });
  check(why == "a message of 100000 bytes cannot have 100001 available", why);
  Bytes got(100'000);
  const auto received = m.box.receive(0, envelope(got.size()), got.data());
  const auto sent = m.box.send_partly(0, envelope(got.size()), data.data(), 8);
  why = refusal([&] { m.box.supply(*sent, 100'001); });
  check(why == "a message of 100000 bytes cannot have 100001 available", why);
  m.box.supply(*sent, got.size());
  m.wait(sent), m.wait(received);
}

}  // namespace pycollect::ipc
