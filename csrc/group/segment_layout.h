// Layout of the shared-memory segment of a group. Nothing here needs a lock: a word that changes
// while peers read it has one writer, or is atomic (the abort record, doorbells, counts of
// sleepers). All zeros is the initial state.
//
//   Control | a RankState per rank | two FingerprintDetails per rank | mailboxes | two staging
//   buffers per rank | symmetric heaps | exposed memory per rank
#pragma once
#include <linux/futex.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "../plan/plan.h"

namespace pycollect::ipc {

inline constexpr int kMaxRanks = 64;  // most ranks of a group: sets of ranks are 64-bit masks

// A collective is one or more runs of a rank program, each for one piece of the data. A rank's
// progress counter (RankState::progress) holds the number of its current run and, in the lower
// kTaskBits bits, the number of tasks that it has finished in that run. The end of a run is
// published as `at_run` of the next one, so the ranks' programs may have different numbers of
// tasks. A counter only grows and is never reset; `reached` compares two values with wrap-around.
inline constexpr int kTaskBits = 20;
constexpr uint64_t at_run(uint64_t run) { return run << kTaskBits; }
constexpr bool reached(uint64_t seen, uint64_t wanted) {
  return static_cast<int64_t>(seen - wanted) >= 0;
}

// Returns text that a peer wrote to shared memory, which may lack a terminating zero.
template <std::size_t n>
std::string read_text(const std::array<char, n>& written) {
  return {written.data(), strnlen(written.data(), n)};
}

// Fingerprint that a rank publishes when it enters a call.
struct Fingerprint {
  // Hash of all that must be equal on all ranks; CallDescription has the hashed values.
  uint64_t fingerprint_hash = 0;
  uint32_t pieces = 0;  // number of runs that this rank needs; all ranks execute the maximum
  uint32_t flags = 0;
  enum : uint32_t {
    refused = 1,    // the rank does not take part; FingerprintDetails::refusal says why
    irregular = 2,  // element counts follow its FingerprintDetails and must match the peers'
    zero_copy = 4,  // peers can access its tensors in place, at CallEntry::registered
  };
};

// Registered offsets of a call's tensors: bytes from the beginning of the rank's symmetric heap.
struct RegisteredOffsets {
  uint64_t input = 0, output = 0;
};

// What a rank publishes when it enters a call, in one cache line, which peers poll: a second line
// would take as long again to reach them as the rest of a small call. Each rank has two, used
// alternately: it overwrites the entry of call n - 1 with that of call n + 1 after all ranks have
// entered call n, and so have finished call n - 1.
struct alignas(128) CallEntry {
  static constexpr std::size_t kDataBytes = 40;
  std::atomic<uint64_t> progress{0};  // the progress counter at the entry; written last
  Fingerprint fingerprint = {};
  union {
    RegisteredOffsets registered = {};
    std::array<std::byte, kDataBytes> data;  // takes the place of the staging buffer if it fits
  };
};

// State that one rank publishes. The rank is the only writer, except that waiting peers count
// themselves in `sleepers`. Fields that peers poll and fields that are often written have a cache
// line each.
struct alignas(128) RankState {
  std::array<CallEntry, 2> entries = {};  // [call & 1]
  // Progress counter: see at_run. Peers poll it in all waits but those for the entry.
  alignas(64) std::atomic<uint64_t> progress{0};
  // Progress counter at the end of this rank's last call, if `progress` has not been advanced to
  // it. If no peer waits for the end of a call, the next call advances `progress` beyond it: one
  // store less to a line that peers poll. Peers read `ended` only to decide whether a rank that
  // died or left had finished its run.
  alignas(64) std::atomic<uint64_t> ended{0};
  std::atomic<uint32_t> sleepers{0};  // number of threads in a futex wait on `progress`
  std::atomic<uint32_t> left{0};      // not 0: the rank has destroyed its group
  enum : uint32_t { has_left = 1, left_with_store = 2 };  // 2: and ends the server of the store
  std::atomic<int32_t> on_core{0};  // core on which the rank ran last, + 1; 0: unknown
};
static_assert(sizeof(RankState) == 384);

// Values that the hash of a rank's Fingerprint covers, for error messages.
struct CallDescription {
  uint8_t collective = 0, dtype = 0, op = 0, flags = 0;
  int32_t root = -1;
  uint64_t call = 0;      // sequence number
  uint64_t elements = 0;  // of the rank's input, or of its output if it has no input
  uint64_t options = 0;   // other values that must agree: algorithm hash, number of tensors
  // A call of several requests (of several dtypes, or coalesced) first exchanges one fingerprint of
  // all of them, whose description is that of the first request. If the ranks differ, and for an
  // irregular request, they then exchange a fingerprint of each request. `parts` is the number of
  // requests, and `part` the index of this one, from 0.
  uint32_t part = 0, parts = 1;
  enum : uint8_t { in_place = 1, sparse = 2 };
};

// In the segment, two counts for each rank follow the details, for irregular calls: the numbers of
// elements that this rank sends to each, then the numbers that it receives from each.
struct alignas(64) FingerprintDetails : CallDescription {
  std::array<char, 216> refusal = {};  // why the rank refused, as text
};

// Abort state of the group. The first rank that detects a failure sets `being_written`, writes
// the cause, and then sets `lost` or `timed_out`. Every rank that aborts the group lowers
// `first_call` to the number of the first call that it has not finished itself, + 1 (0: none has
// aborted it): all ranks finish the calls before, because nothing that these need is missing.
struct AbortRecord {
  enum : uint32_t { healthy, being_written, lost, timed_out };
  std::atomic<uint32_t> state{healthy};
  std::atomic<uint64_t> first_call{0};
  uint64_t call = 0;
  std::array<char, 48> operation = {};  // operation that detected the failure; may be empty
  std::array<char, 512> cause = {};
};

// Liveness lock of a rank: a robust futex, which one thread of the rank holds as long as the group
// exists, and the thread's robust list, which names that futex. When the thread ends, the kernel
// walks the list and sets FUTEX_OWNER_DIED in the futex. Both are in shared memory: some kernels
// reclaim an OOM-killed process's private memory, where the C library has its list, before they
// walk the list, and so leave its locks held.
struct alignas(64) LivenessLock {
  robust_list_head list;
  robust_list entry;
  // The futex: id of the thread that holds it. With FUTEX_OWNER_DIED, the thread ended while it
  // held the lock.
  std::atomic<uint32_t> holder{0};
  std::atomic<int32_t> pid{0};  // pid in the process's own pid namespace; 0: not arrived yet
};

// Control block of the group, at the beginning of the segment.
struct alignas(128) Control {
  AbortRecord record;
  std::array<std::atomic<uint64_t>, kMaxRanks> nonces = {};
  std::array<LivenessLock, kMaxRanks> liveness = {};
};

struct SegmentSizes {
  int world;
  std::size_t buffer_bytes;   // most that a run stages in one of a rank's two staging buffers
  std::size_t mailbox_bytes;  // mailboxes of all ranks
  // Symmetric heap of one rank; address space, of which parts are committed.
  std::size_t symmetric_heap_bytes;
  std::size_t exposed_bytes = 0;  // exposed memory of one rank; address space, too
};

// Upper limit of each size in SegmentSizes: 64 TiB, so that sums of sizes cannot overflow.
inline constexpr std::size_t kMostBytes = std::size_t{1} << 46;

// Offsets in bytes of the parts of a segment from its beginning. Each part begins at a page.
struct SegmentLayout {
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t up(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  // Bytes between consecutive staging buffers: 3 pages and 5 cache lines. Without them, equal
  // offsets in all buffers would fall on the same cache sets, because the size of a buffer is
  // mostly a power of two, and copies between buffers would be a third slower.
  static constexpr std::size_t kStagger = 3 * kPage + 5 * 64;

  // Bytes of a staging buffer whose slots consecutive runs of the same size use in turn: a store to
  // a line that is still in a peer's L2 cache takes four times as long as one to a line that both
  // ranks have evicted. With two buffers this is twice the L2 cache of Zen 4, where it made an
  // all_reduce of 16 to 128 KiB by two ranks 1.5 to 2.7 times as fast. Larger runs fill the caches
  // themselves.
  static constexpr std::size_t slots_bytes(std::size_t buffer_bytes) {
    return std::min<std::size_t>(2 * buffer_bytes, 1 << 20);
  }

  explicit constexpr SegmentLayout(const SegmentSizes& s)
      : sizes(s),
        rank_states(up(sizeof(Control))),
        fingerprint_details_begin(rank_states + up(s.world * sizeof(RankState))),
        fingerprint_details_bytes(sizeof(FingerprintDetails) +
                                  up_to_line(2 * s.world * sizeof(uint64_t))),
        mailboxes(fingerprint_details_begin + up(2 * s.world * fingerprint_details_bytes)),
        staging_buffers(mailboxes + up(s.mailbox_bytes)),
        buffer_stride(up_to_line(std::max(s.buffer_bytes, slots_bytes(s.buffer_bytes))) + kStagger),
        heaps(staging_buffers + up(2 * s.world * buffer_stride)),
        heap_stride(up(s.symmetric_heap_bytes)),
        exposed_begin(heaps + s.world * heap_stride),
        exposed_stride(up_to_line(s.exposed_bytes) + kStagger),
        total(exposed_begin + up(s.world * exposed_stride)) {}

  constexpr std::size_t fingerprint_details(Rank r, uint64_t call) const {
    return fingerprint_details_begin + (2 * r + (call & 1)) * fingerprint_details_bytes;
  }
  constexpr std::size_t staging_buffer(Rank r, uint64_t run) const {
    return staging_buffers + r * staging_step() + (run & 1) * buffer_stride;
  }
  constexpr std::size_t staging_step() const { return 2 * buffer_stride; }  // from rank to rank
  constexpr std::size_t heap(Rank r) const { return heaps + r * heap_stride; }
  constexpr std::size_t exposed(Rank r) const { return exposed_begin + r * exposed_stride; }
  static constexpr std::size_t up_to_line(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

  SegmentSizes sizes;
  std::size_t rank_states, fingerprint_details_begin, fingerprint_details_bytes, mailboxes,
      staging_buffers, buffer_stride, heaps, heap_stride, exposed_begin, exposed_stride, total;
};

}  // namespace pycollect::ipc
