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
  // Large messages that a rank takes in at a time: enough for all cores of the senders to be at
  // work, and 1 MiB of buffers a rank.
  static constexpr int kLanes = 4;
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
    return lanes_at(world) + world * kLanes * (sizeof(LaneCounters) + kLaneBytes);
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
    std::byte* const at =
        base_ + lanes_at(world_) + (owner * kLanes + i) * (sizeof(LaneCounters) + kLaneBytes);
    return {reinterpret_cast<LaneCounters*>(at), at + sizeof(LaneCounters)};
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
