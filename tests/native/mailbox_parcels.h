// Parcels: messages whose ticket alone is moved, and what each end then does when its turn comes.
#pragma once
#include "mailbox_faults.h"

namespace pycollect::shm {

inline constexpr std::size_t kParcelBytes = 200'000;
using Turn = Mailbox::Turn;

// Until it is this end's turn, or the transfer is done.
inline Turn turn_of(const Member& m, Mailbox::Transfer& transfer) {
  m.box.wait(
      transfer, [&] { return transfer.done() || transfer.turn() != Turn::none; }, m.occasion());
  return transfer.done() ? Turn::none : transfer.turn();
}

// What becomes of the parcel with this tag, by turns.
enum class Fate : uint32_t { fetched, in_parts, accepted, ordinary, count };
inline constexpr int kParts = 4;

inline void send_parcels(const Member& m, const std::vector<uint32_t>& tags) {
  std::vector<std::shared_ptr<Mailbox::Transfer>> sent;
  std::vector<Bytes> data;
  for (const uint32_t tag : tags) {
    data.push_back(pattern(kParcelBytes, tag));
    sent.push_back(m.box.send_parcel(1, of(kParcelBytes, tag), {tag, ~uint64_t{tag}, 0, 0}));
    const int word = static_cast<int>(tag);  // an ordinary one between them
    m.wait(m.box.send(1, of(4, tag), reinterpret_cast<const std::byte*>(&word)));
  }
  // Served in whatever order the other end asks for them.
  const auto open = [](const auto& it) { return !it->done(); };
  std::vector<int> parts(tags.size(), 1), supplied(tags.size(), 0);
  for (auto first = sent.begin(); (first = std::find_if(first, sent.end(), open)) != sent.end();) {
    const uint64_t seen = m.box.turns();
    for (std::size_t i = 0; i < tags.size(); ++i) {
      const Turn turn = sent[i]->done() ? Turn::none : sent[i]->turn();
      if (turn == Turn::more) ++parts[i], m.box.send_more(*sent[i]);
      if (turn == Turn::supply) ++supplied[i], m.box.supply(*sent[i], data[i].data());
    }
    m.box.wait(**first, [&] { return (*first)->done() || m.box.turns() != seen; }, m.occasion());
  }
  for (std::size_t i = 0; i < tags.size(); ++i) {
    m.wait(sent[i]);
    const auto fate = Fate{tags[i] % static_cast<uint32_t>(Fate::count)};
    check(parts[i] == (fate == Fate::in_parts ? kParts : 1), text(parts[i], " parts"));
    check(supplied[i] == (fate == Fate::accepted || fate == Fate::ordinary ? 1 : 0));
    check(!sent[i]->in_vain());
  }
}

inline void receive_parcel(const Member& m, uint32_t tag) {
  const auto fate = Fate{tag % static_cast<uint32_t>(Fate::count)};
  const std::optional<Rank> from = tag % 3 == 0 ? std::nullopt : std::optional<Rank>(0);
  Bytes got(kParcelBytes);
  if (fate == Fate::ordinary) {
    m.wait(m.box.receive(from, of(kParcelBytes, tag), got.data()));
    return check(got == pattern(kParcelBytes, tag));
  }
  const auto received = m.box.receive_parcel(from, of(kParcelBytes, tag));
  for (int part = 1; turn_of(m, *received) == Turn::fetch; ++part) {
    check(received->peer() == 0 && received->ticket() == Ticket{tag, ~uint64_t{tag}, 0, 0});
    if (fate == Fate::accepted)
      m.box.accept(*received, got.data(), false);
    else
      m.box.fetched(*received, fate == Fate::fetched || part == kParts);
  }
  m.wait(received);
  check(fate != Fate::accepted || got == pattern(kParcelBytes, tag));
}

inline void parcels(const Member& m) {
  std::vector<uint32_t> tags;
  for (uint32_t tag = 0; tag < 24; ++tag) tags.push_back(tag);
  if (m.rank == 0) return send_parcels(m, tags), check(m.box.idle());
  for (std::size_t i = 0; i < tags.size(); ++i) {
    const uint32_t tag = tags[i * 7 % tags.size()];
    int word = 0;
    receive_parcel(m, tag);
    m.wait(m.box.receive(0, of(4, tag), reinterpret_cast<std::byte*>(&word)));
    check(word == static_cast<int>(tag));
  }
  check(m.box.idle());
}

// An ordinary message for a receive of a parcel, and a parcel for a rank that takes none.
inline void parcels_one_sided(const Member& m) {
  const Bytes data = pattern(kParcelBytes, 5);
  if (m.rank == 0) {
    m.wait(m.box.send(1, of(kParcelBytes), data.data()));
    const auto parcel = m.box.send_parcel(1, of(kParcelBytes), {});
    check(turn_of(m, *parcel) == Turn::supply && parcel->in_vain());
    m.box.supply(*parcel, data.data());
    return m.wait(parcel);
  }
  Bytes got(kParcelBytes);
  const auto received = m.box.receive_parcel(0, of(kParcelBytes));
  check(turn_of(m, *received) == Turn::fetch && !received->ticket());
  m.box.accept(*received, got.data(), false);
  m.wait(received);
  check(got == data);
  m.box.take_no_parcels();
  got.assign(kParcelBytes, std::byte{0});
  m.wait(m.box.receive(0, of(kParcelBytes), got.data()));
  check(got == data);
}

// Refused on both sides, as other messages are; one that is small, at once.
inline void parcels_unlike(const Member& m) {
  std::string why;
  if (m.rank == 0) {
    why = refusal([&] { m.wait(m.box.send_parcel(1, of(kParcelBytes), {})); });
  } else {
    why = refusal([&] { m.wait(m.box.receive_parcel(0, of(2 * kParcelBytes))); });
    check(refusal([&] { m.box.receive_parcel(0, of(8)); }).starts_with("a parcel has 8 bytes"));
  }
  check(why.starts_with(text("rank 0 sent ", kParcelBytes, " bytes of ")), why);
  check(m.box.idle());
}

// An end that dies at its turn; the other's turns come to nothing then.
inline void parcels_of_the_dead(const Member& m) {
  const bool sends = m.rank != 1;
  const auto transfer = sends ? m.box.send_parcel(1, of(kParcelBytes), {})
                              : m.box.receive_parcel(0, of(kParcelBytes));
  if (m.rank == 1) {
    check(turn_of(m, *transfer) == Turn::fetch);
    kill(getpid(), SIGKILL);
  }
  try {
    m.wait(transfer);
    check(false, "no PeerLost");
  } catch (const PeerLost& error) {
    check(std::string(error.what()).find("rank 1") != std::string::npos, error.what());
  }
  Bytes data(kParcelBytes);
  m.box.send_more(*transfer);
  m.box.supply(*transfer, data.data());
  check(m.box.idle());
}

}  // namespace pycollect::shm
