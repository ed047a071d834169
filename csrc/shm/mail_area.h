// Where a group's mailboxes lie in its memory:
//
//   a bell per rank | messages and answers per ordered pair | lanes per rank
//
// A rank and itself are a pair like any other.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>

#include "bell.h"
#include "layout.h"
#include "mail_lane.h"
#include "mail_ring.h"

namespace pycollect::shm {

class MailArea {
 public:
  // Large messages that a rank takes in at a time: one of each peer, so that none which has stopped
  // keeps the others out, and some more where that is few. All are together at most 2 MiB a rank.
  static constexpr int lanes(int world) { return std::max(4, world + 1); }
  static constexpr std::size_t lane_bytes(int world) {
    constexpr std::size_t kAll = 2 << 20, kUnit = 4 << 10;
    return std::min(kMostLaneBytes, kAll / lanes(world) / kUnit * kUnit);
  }
  // A rank's messages to all others take 1 MiB; of that at most 128 KiB, two thousand of the
  // smallest, for one peer.
  static constexpr std::size_t message_bytes(int world) {
    return std::min<std::size_t>(128 << 10, std::bit_floor((std::size_t{1} << 20) / world));
  }
  // A message of so many bytes is copied into the ring, and its send is complete at once. Above it
  // the two ends copy at the same time, which pays for asking first (16 KiB took 0.86 us that way
  // and takes 0.59). Four fit in a ring: see RingPlace.
  static constexpr std::size_t most_whole(int world) {
    return std::min<std::size_t>(16 << 10, message_bytes(world) / 4 - sizeof(Record));
  }
  // 16 answers: four grants may be unread, and more that do not fit wait on the receiver's side.
  static constexpr std::size_t kAnswerBytes = 1 << 10;

  static constexpr std::size_t bytes(int world) {
    return lanes_at(world) + world * lanes(world) * (sizeof(LaneCounters) + lane_bytes(world));
  }
  // Messages that are in a ring at the most.
  static constexpr int most_unread(int world) {
    return static_cast<int>(message_bytes(world) / detail::kRecordUnit);
  }

  MailArea(std::byte* base, int world) : base_(base), world_(world) {}

  int world() const { return world_; }
  Bell& bell(Rank r) const { return *reinterpret_cast<Bell*>(base_ + r * sizeof(Bell)); }
  RingPlace messages(Rank from, Rank to) const {
    return ring(pair(from, to), message_bytes(world_));
  }
  // To `from`, about its messages.
  RingPlace answers(Rank from, Rank to) const {
    return ring(pair(from, to) + sizeof(RingCounters) + message_bytes(world_), kAnswerBytes);
  }
  LanePlace lane(Rank owner, int i) const {
    const std::size_t bytes = lane_bytes(world_);
    std::byte* const at =
        base_ + lanes_at(world_) + (owner * lanes(world_) + i) * (sizeof(LaneCounters) + bytes);
    return {reinterpret_cast<LaneCounters*>(at), at + sizeof(LaneCounters), bytes};
  }

 private:
  static constexpr std::size_t pair_bytes(int world) {
    return 2 * sizeof(RingCounters) + message_bytes(world) + kAnswerBytes;
  }
  static constexpr std::size_t lanes_at(int world) {
    return world * sizeof(Bell) + world * world * pair_bytes(world);
  }
  std::byte* pair(Rank from, Rank to) const {
    return base_ + world_ * sizeof(Bell) + (from * world_ + to) * pair_bytes(world_);
  }
  static RingPlace ring(std::byte* at, std::size_t bytes) {
    return {reinterpret_cast<RingCounters*>(at), at + sizeof(RingCounters), bytes};
  }

  std::byte* base_;
  int world_;
};

}  // namespace pycollect::shm
