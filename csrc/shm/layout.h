// What lies where in the memory that a group's processes share. Every word that changes while
// others look has one writer; nothing here needs a lock, and all zeros is the state to begin with.
//
//   control | a line per rank | two descriptions per rank | mailboxes | deck of GPUs | two slots
//   per rank | arenas
#pragma once
#include <linux/futex.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "../plan/plan.h"

namespace pycollect::shm {

inline constexpr int kMostRanks = 64;  // not more than that share a host here; a bit each

// A collective is one or more runs of a program, a piece of the data each. `done` says how far a
// rank is: the number of its run, then how many tasks of that run it has finished. It only grows,
// compared cyclically, and a finished run is the beginning of the next one, so ranks need no common
// length of a run, and nobody ever resets anything.
inline constexpr int kTaskBits = 20;
constexpr uint64_t at_run(uint64_t run) { return run << kTaskBits; }
constexpr bool reached(uint64_t seen, uint64_t wanted) {
  return static_cast<int64_t>(seen - wanted) >= 0;
}

// As another rank has written it, perhaps without a zero at its end.
template <std::size_t n>
std::string sentence(const std::array<char, n>& written) {
  return {written.data(), strnlen(written.data(), n)};
}

// What a rank says of the call that it begins, in the line that the others poll anyway. Two of
// each: a rank posts call n + 1 when all have posted n, and then all have read n - 1.
struct Post {
  uint64_t signature = 0;  // equal on all ranks, or else their descriptions say what differs
  uint32_t pieces = 0;     // runs that the rank thinks it takes; the most that any rank says counts
  uint32_t flags = 0;
  enum : uint32_t {
    refused = 1,    // the rank does not take part: its own arguments were bad
    irregular = 2,  // what it sends and receives is in its description, and must fit the others'
    placed = 4,     // what others would touch of its tensors lies where they reach it: see `places`
  };
};

// Where a call's tensors lie: in their rank's arena, in bytes from its beginning; or in GPU memory,
// as slabs/tracts.h names places there.
struct Places {
  uint64_t input = 0, output = 0;
};

// One per rank, and its only writer is the rank (but for `sleepers`). What is often written, what
// is looked at meanwhile and what hardly ever changes have a cache line each: 1 KiB of two ranks
// gained 7 % by it.
struct alignas(128) Line {
  std::atomic<uint64_t> done{0};
  std::array<Post, 2> posts = {};  // [call & 1]; written before `done` reaches the call

  alignas(64) std::array<Places, 2> places = {};
  // The run after its last call's, for who asks what a rank that is gone has left undone. `done`
  // has no need to say it before the next call does, and a store there takes the line from who
  // looks at it: a fifth of a small call.
  std::atomic<uint64_t> ended{0};

  alignas(64) std::atomic<uint32_t> sleepers{0};  // how many wait in the kernel for `done`
  std::atomic<uint32_t> left{0};                  // the rank has destroyed its group
  std::atomic<int32_t> on_core{0};                // where it ran last, + 1; 0: nobody knows
};
static_assert(sizeof(Line) == 256);

// For people, and for what a signature cannot compare. The counts that follow are `world` sent and
// `world` received elements, by peer.
struct alignas(64) Description {
  uint8_t collective = 0, dtype = 0, op = 0, flags = 0;
  int32_t root = -1;
  uint64_t call = 0;      // sequence number
  uint64_t elements = 0;  // of the rank's largest buffer
  uint64_t options = 0;   // what else must agree: algorithm, number of tensors
  // Of the requests that are agreed on together: which one this is, and how many there are; 0: this
  // describes the first and stands for all of them.
  uint32_t part = 0, parts = 1;
  std::array<char, 216> refusal = {};  // a sentence
  enum : uint8_t { in_place = 1, on_gpus = 2 };
};

// What broke the group: the first who finds out writes it, between the two values of `state`.
struct Breakage {
  enum : uint32_t { whole, being_said, lost, timed_out };
  std::atomic<uint32_t> state{whole};
  uint64_t call = 0;
  std::array<char, 48> operation = {};  // in which it was found; empty: in none
  std::array<char, 512> cause = {};
};

// A rank's lock, held by one of its threads, and the list of that thread's locks, which the kernel
// goes through when the thread ends. C libraries keep that list in memory of the process alone,
// which some kernels take from a process that they kill for want of memory, and then its locks stay
// held; from memory that others have, too, they take nothing.
struct alignas(64) Life {
  robust_list_head list;
  robust_list entry;
  std::atomic<uint32_t> holder{0};  // the thread; FUTEX_OWNER_DIED: it has ended and held the lock
  std::atomic<int32_t> pid{0};      // of the process, as it has it itself; 0: not come yet
};

// One for all.
struct alignas(128) Control {
  Breakage breakage;
  std::array<std::atomic<uint64_t>, kMostRanks> nonces = {};
  std::array<Life, kMostRanks> lives = {};
};

struct Extents {
  int world;
  std::size_t slot_bytes;      // of one rank, for one of two runs
  std::size_t mailbox_bytes;   // of all ranks
  std::size_t arena_bytes;     // of one rank: address space, not memory, until somebody commits it
  std::size_t deck_bytes = 0;  // of all ranks: what CUDA's streams read and write
};

// Of each of those sizes: more than an address space has, and so little that no sum of them wraps.
inline constexpr std::size_t kMostBytes = std::size_t{1} << 46;

// Offsets in bytes from the beginning; each part begins at a page.
struct Layout {
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t up(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  // Slots and arenas that are equal distances apart fall on the same sets of a cache: 3 pages and 5
  // lines more keep them apart (copies between such were a third slower).
  static constexpr std::size_t kStagger = 3 * kPage + 5 * 64;

  explicit constexpr Layout(const Extents& s)
      : sizes(s),
        lines(up(sizeof(Control))),
        descriptions(lines + up(s.world * sizeof(Line))),
        description_bytes(sizeof(Description) + up_to_line(2 * s.world * sizeof(uint64_t))),
        mailboxes(descriptions + up(2 * s.world * description_bytes)),
        deck(mailboxes + up(s.mailbox_bytes)),
        slots(deck + up(s.deck_bytes)),
        slot_stride(up_to_line(s.slot_bytes) + kStagger),
        arenas(slots + up(2 * s.world * slot_stride)),
        arena_stride(up(s.arena_bytes)),
        total(arenas + s.world * arena_stride) {}

  constexpr std::size_t description(Rank r, uint64_t call) const {
    return descriptions + (2 * r + (call & 1)) * description_bytes;
  }
  constexpr std::size_t slot(Rank r, uint64_t run) const {
    return slots + (2 * r + (run & 1)) * slot_stride;
  }
  constexpr std::size_t arena(Rank r) const { return arenas + r * arena_stride; }
  static constexpr std::size_t up_to_line(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

  Extents sizes;
  std::size_t lines, descriptions, description_bytes, mailboxes, deck, slots, slot_stride, arenas,
      arena_stride, total;
};

}  // namespace pycollect::shm
