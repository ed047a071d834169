// Where a group's mailboxes lie in its memory: a bell per rank, then three rings per ordered pair.
// A rank and itself are a pair like any other.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>

#include "bell.h"
#include "layout.h"
#include "mail_ring.h"

namespace pycollect::shm {

class MailArea {
 public:
  // A rank's messages to all others take 1 MiB; of that at most 128 KiB, two thousand of the
  // smallest, for one peer.
  static constexpr std::size_t message_bytes(int world) { return share(1 << 20, 128 << 10, world); }
  // A message of so many bytes is copied into the ring, and its send is complete at once. Above it
  // the two ends copy at the same time, which pays for asking first (16 KiB took 0.86 us that way
  // and takes 0.59).
  static constexpr std::size_t most_whole(int world) {
    return std::min<std::size_t>(16 << 10, most_payload(message_bytes(world)));
  }
  // What is larger has a ring of its own, in which nothing that nobody has asked for is ever before
  // it: 2 MiB for what a rank takes in, of that at most 1 MiB from one peer. On crowded cores each
  // turn of an end moves that much (256 KiB between two ranks: messages of 64 KiB to 4 MiB took up
  // to twice as long).
  static constexpr std::size_t piece_bytes(int world) { return share(2 << 20, 1 << 20, world); }
  // So small that the two ends are at work at the same time from early on, so large that the
  // counters' way between the cores (0.15 us) is little beside the copy. A ring holds a whole
  // number of the records that these make.
  static constexpr std::size_t piece(int world, uint64_t bytes) {
    const std::size_t most =
        std::min<std::size_t>(64 << 10, piece_bytes(world) / RingPlace::kFewest);
    return std::clamp<std::size_t>(std::bit_ceil(bytes / 8), 4 << 10, most) - sizeof(Record);
  }
  // 16 answers; more that do not fit wait on the receiver's side.
  static constexpr std::size_t kAnswerBytes = 1 << 10;

  static constexpr std::size_t bytes(int world) {
    return world * sizeof(Bell) + world * world * pair_bytes(world);
  }
  // Messages that are in a ring at the most.
  static constexpr int most_unread(int world) {
    return static_cast<int>(message_bytes(world) / detail::kRecordUnit);
  }

  MailArea(std::byte* base, int world) : base_(base), world_(world) {}

  int world() const { return world_; }
  Bell& bell(Rank r) const { return *reinterpret_cast<Bell*>(base_ + r * sizeof(Bell)); }
  RingPlace messages(Rank from, Rank to) const { return ring(from, to, 0, message_bytes(world_)); }
  RingPlace pieces(Rank from, Rank to) const {
    return ring(from, to, ring_bytes(message_bytes(world_)), piece_bytes(world_));
  }
  // To `from`, about its messages.
  RingPlace answers(Rank from, Rank to) const {
    return ring(from, to, pair_bytes(world_) - ring_bytes(kAnswerBytes), kAnswerBytes);
  }

 private:
  static constexpr std::size_t share(std::size_t all, std::size_t most, int world) {
    return std::min(most, std::bit_floor(all / world));
  }
  static constexpr std::size_t most_payload(std::size_t ring) {
    return ring / RingPlace::kFewest - sizeof(Record);
  }
  static constexpr std::size_t ring_bytes(std::size_t data) { return sizeof(RingCounters) + data; }
  static constexpr std::size_t pair_bytes(int world) {
    return ring_bytes(message_bytes(world)) + ring_bytes(piece_bytes(world)) +
           ring_bytes(kAnswerBytes);
  }
  RingPlace ring(Rank from, Rank to, std::size_t at, std::size_t bytes) const {
    std::byte* const ring =
        base_ + world_ * sizeof(Bell) + (from * world_ + to) * pair_bytes(world_) + at;
    return {reinterpret_cast<RingCounters*>(ring), ring + sizeof(RingCounters), bytes};
  }

  std::byte* base_;
  int world_;
};

}  // namespace pycollect::shm
