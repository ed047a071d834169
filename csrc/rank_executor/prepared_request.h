// What all calls of the same request have in common, prepared once: its rank programs bound to its
// sizes, its fold, and its fingerprint. A repeated call finds it with one comparison.
#pragma once
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../cpu/executor.h"
#include "../group/group.h"
#include "../plan/select.h"
#include "agreement.h"
#include "rank_program.h"

namespace pycollect::ipc {

// Where an operand of an instruction is, on the first run: `offset` bytes behind a base, which is
// the beginning of a tensor or of a rank's staging buffer.
struct OperandPlace {
  uint32_t base;  // number of the base, see the constants below
  uint32_t item;  // bytes of an element
  std::size_t offset;
  // This rank's input and output, then of each rank its staging buffer, its exposed input and its
  // exposed output.
  static constexpr uint32_t kInput = 0, kOutput = 1, kOfRanks = 2, kBasesOfRank = 3;
  static uint32_t of_rank(Rank r, OperandBuffer where) {
    return kOfRanks + r * kBasesOfRank +
           (where == OperandBuffer::staging ? 0
            : where == OperandBuffer::input ? 1
                                            : 2);
  }
  bool is_own() const { return base < kOfRanks; }
};

// A rank program bound to the sizes of a request.
struct BoundProgram {
  const RankProgram& program;
  // Bytes of a region of the staging buffers; the same on all ranks. 0: unused.
  std::size_t stride = 0;
  std::size_t largest = 0;                // elements of the largest chunk
  bool in_entry = false;                  // the staging buffers lie in the ranks' CallEntries
  std::size_t slots = 1, slot_bytes = 0;  // of a staging buffer, which runs use in turn
  Pieces pieces = {};                     // of this rank; peers may need more
  std::vector<std::size_t> counts = {};   // [instruction]: elements that it moves in all pieces
  std::vector<OperandPlace> places = {};  // [operand, see Instruction::first_operand]
};

// Returns the pieces into which all ranks cut the data, of which some need `of_all`. Pieces only
// become smaller.
Pieces common_pieces(const BoundProgram& bound, Pieces of_all, std::size_t item, bool irregular);

// What of a group determines how its requests are prepared.
struct PreparationSettings {
  std::size_t buffer_bytes;  // as in SegmentSizes
  bool has_symmetric_heap;   // ranks may access tensors in place
};

// Decides whether a rank writes to staging buffers through its caches or with non-temporal stores.
// The former are faster where the ranks' cores share a cache, because peers read the data from it.
// Elsewhere they wait for each line that a peer has read: to write and to read 64 KiB took 31 us on
// a Zen 4, where the non-temporal ones took 6 us. It was 3 and 9 us when the same virtual machine
// had cores whose signals took a third of the time, which seem to have shared their L3 cache. It
// does not say so, and ranks change cores. So a series of calls now and then compares both. All
// ranks try the same kind, as they count the same calls; only in irregular calls they may not. The
// first series may find memory that no peer has read, so the next ones follow soon.
class StoreChoice {
 public:
  static constexpr std::size_t kLeastBytes = 512;  // of a chunk; smaller ones use the caches
  bool is_trial() const { return at() < kSeries; }
  // Returns true if the stores of this call are to be non-temporal.
  bool is_non_temporal() const { return is_trial() ? kKinds >> at() & 1 : non_temporal_; }
  // Takes the time of a trial without the wait for the ranks to enter the call. Other waits, for a
  // core or a peer, only make a call slower: the fastest of each kind counts.
  void measured(bool non_temporal, Clock::duration took) {
    least_[non_temporal] = std::min(least_[non_temporal], took);
  }
  // Ends a call on which all ranks have agreed: others are not counted by all.
  void next() {
    ++calls_;
    if (at() == kSeries) end_series();
  }

 private:
  static constexpr uint32_t kSeries = 6, kFirstPause = 64, kPause = 512;
  static constexpr uint32_t kKinds = 0b100110;  // no kind meets only every second call
  static constexpr auto kNone = Clock::duration::max();
  uint32_t at() const { return calls_ - series_; }  // very large before the next series
  void end_series() {
    series_ += std::clamp(series_, kFirstPause, kPause);
    if (std::max(least_[0], least_[1]) < kNone) non_temporal_ = least_[1] < least_[0] / 10 * 9;
    least_.fill(kNone);
  }
  bool non_temporal_ = false;
  uint32_t calls_ = 0, series_ = 0;  // the call at which the next or current series begins
  std::array<Clock::duration, 2> least_ = {kNone, kNone};
};

class PreparedRequest {
 public:
  // Throws std::invalid_argument for a request that cannot run, TypeError for a reduction that the
  // dtype does not have.
  PreparedRequest(const CollectiveRequest& request, RankPrograms& programs,
                  const PreparationSettings& settings);
  PreparedRequest(const PreparedRequest&) = delete;
  PreparedRequest& operator=(const PreparedRequest&) = delete;

  // Returns whether this was prepared for a request that differs at most in where its data is.
  // Never for a request of sparse tensors, on whose form the ranks agree, too. `properties`: what
  // the request is besides its root, sizes and data, in one word.
  bool serves(const CollectiveRequest& request, uint64_t properties) const;
  std::size_t item() const { return row.item(); }

 private:
  const std::string algorithm_;
  const Sizes input_blocks_, output_blocks_;

 public:
  const CollectiveRequest request;  // without spans
  const cpu::RowRunner row;
  std::size_t bytes = 0;                   // size of all blocks; 0 if a rank cannot compute it
  bool non_temporal = false;               // the output is too large for the caches
  CallFingerprint common;                  // of calls without registered offsets
  std::optional<BoundProgram> in_buffers;  // its ranks access only each other's staging buffers
  std::optional<BoundProgram> in_tensors;  // zero-copy; none: too slow, or impossible
  mutable bool reserved = false;           // its regions of the staging buffers are committed
  bool chooses_stores = false;             // for the staging buffers; else through the caches
  mutable StoreChoice stores = {};

 private:
  const std::size_t input_elements_, output_elements_;
  const uint64_t properties_;
};

// Throws std::invalid_argument or TypeError for a request that rank `me` cannot run by any
// algorithm.
void check_request(const CollectiveRequest& request, RankAndWorld me);

// The prepared requests of a group, each in a place that its properties determine.
class RequestCache {
 public:
  RequestCache(RankAndWorld me, const PreparationSettings& settings)
      : programs_(me), settings_(settings) {}
  const PreparedRequest& find(const CollectiveRequest& request);
  RankAndWorld me() const { return programs_.me(); }

 private:
  static constexpr std::size_t kPlaces = 64;  // more than the calls of a step of most programs
  RankPrograms programs_;
  const PreparationSettings settings_;
  std::array<std::unique_ptr<const PreparedRequest>, kPlaces> places_ = {};
};

}  // namespace pycollect::ipc
