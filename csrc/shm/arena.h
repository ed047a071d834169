// Hands out parts of a rank's arena, where other ranks read and write them: tensors that lie there
// are not copied. Memory is got for more than what is asked, and kept for a while when it is free,
// because fresh pages cost more than a collective does. Keeps the segment when the group has gone.
//
// When a call has failed, other ranks that were in the middle of it may go on for a while, and
// touch what they were lent there: a broken group's arena takes nothing back, and hands out
// nothing.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "../plan/plan.h"
#include "broken.h"
#include "segment.h"
#include "system.h"

namespace pycollect::shm {

class Group;

class Arena {
 public:
  // Of address space for each rank, so that no tensor that fits into the machine fails for lack of
  // it. The same on all ranks of a host.
  static std::size_t default_bytes(int world);
  static constexpr std::size_t kAlignment = 256;  // as torch's caching allocator has it

  explicit Arena(const Group& group);

  // An offset from the beginning of the rank's arena; of nothing, too. Throws std::runtime_error
  // when there is no more memory, or in a forked child; what broke the group when that is broken.
  std::size_t allocate(std::size_t bytes);
  // Does nothing in a forked child: the memory is its parent's. Nor when the group is broken.
  void free(std::size_t offset) noexcept;
  std::byte* data() const { return segment_->data() + begin_; }

  struct Use {
    std::size_t used, kept, reserved;  // bytes in blocks, free but with memory, address space
  };
  Use use() const;

 private:
  struct Run {  // of free bytes, between blocks or runs of the other kind
    std::size_t bytes;
    bool bare;  // its memory was given back
  };
  using Runs = std::map<std::size_t, Run>;

  std::size_t take(std::size_t bytes);
  std::size_t take_run(Runs::iterator run, std::size_t bytes);
  std::size_t extend(std::size_t bytes);
  void commit_to(std::size_t end);
  void add(std::size_t offset, Run run);
  void remove(Runs::iterator run);
  void give_back() noexcept;

  const Origin origin_;
  const std::shared_ptr<Segment> segment_;
  const Broken broken_;
  const std::size_t begin_, bytes_;  // of the arena in the segment
  mutable std::mutex mutex_;
  std::unordered_map<std::size_t, std::size_t> blocks_;
  Runs runs_;
  std::set<std::pair<std::size_t, std::size_t>> by_size_;  // (bytes, offset) of the runs
  std::size_t end_;            // nothing was ever handed out from here on
  std::size_t committed_ = 0;  // up to here, but for the bare runs, there is memory
  std::size_t growth_;
  std::size_t used_ = 0, kept_ = 0;
  uint64_t asked_ = 0;  // how often there was an allocation
};

}  // namespace pycollect::shm
