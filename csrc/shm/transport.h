// What a collective between processes asks of the memory that its data goes through: a buffer of
// each rank that all ranks reach, the peers' tensors where those lie in such memory, signals that
// say how far a rank is, and launches that move elements. There are two: the host's shared memory
// (host_transport.h) and the memory of the ranks' GPUs (slabs/gpu_transport.h).
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "../plan/select.h"
#include "agreement.h"
#include "script.h"

namespace pycollect::shm {

class ChunkLoop;

// One move of a piece, cut where any of its operands goes on in another tensor.
class Rows {
 public:
  struct Row {
    void* const* at;           // [operand]: as the move lists them
    std::size_t begin, count;  // elements, of all rows one after the other
  };

  void clear(const Move& move) {
    move_ = &move;
    at_.clear();
    ends_.clear();
  }
  // A row's operands, to be filled in before `close` says where it ends.
  void** open() {
    at_.resize(at_.size() + move_->operands.size());
    return at_.data() + at_.size() - move_->operands.size();
  }
  void close(std::size_t end) { ends_.push_back(end); }

  const Move& move() const { return *move_; }
  std::size_t size() const { return ends_.size(); }
  std::size_t count() const { return ends_.back(); }  // elements
  Row operator[](std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends_[i - 1];
    return {at_.data() + i * move_->operands.size(), begin, ends_[i] - begin};
  }
  std::size_t find(std::size_t element) const {  // the row that it is in
    return std::upper_bound(ends_.begin(), ends_.end(), element) - ends_.begin();
  }

 private:
  const Move* move_ = nullptr;
  std::vector<void*> at_;
  std::vector<std::size_t> ends_;
};

// Of one rank, for one call at a time. Waiting and moving throw as Group::await does.
class Transport {
 public:
  explicit Transport(Group& group) : group_(group) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  Group& group() const { return group_; }
  Rank rank() const { return group_.rank(); }
  int world() const { return group_.world(); }

  // How ranks reach each other: through buffers, or in the tensors themselves.
  virtual Ground ground(bool in_tensors) const = 0;
  // Is it worth looking whether the tensors lie where all ranks reach them? `bytes`: of all blocks.
  virtual bool may_use_tensors(Collective collective, std::size_t bytes) const = 0;
  // How the other ranks name these bytes of this one's; none: they do not reach them.
  virtual std::optional<uint64_t> place_of(const std::byte* at, std::size_t bytes) const = 0;

  virtual std::size_t buffer_bytes() const = 0;
  virtual uint64_t next_run() const = 0;

  // Both stay until the call has ended. Throws TypeMismatch for a reduction that the type lacks.
  virtual void begin(const Request& request, const Occasion& occasion) = 0;
  // Has the ranks agree on the call, and may have the loop fill the own buffer before. Throws
  // std::invalid_argument on all ranks alike when they were asked for different things.
  virtual Agreed agree(const Statement& mine, ChunkLoop& loop) = 0;
  // Before a script runs in the tensors that the ranks have offered.
  virtual void reach_tensors(const Script& script, std::size_t bytes) = 0;

  // Two by turns, so that a rank can fill one while the others still read the other.
  virtual std::byte* buffer(Rank rank, uint64_t run) const = 0;
  // The input or output of a rank that has offered it.
  virtual std::byte* tensor(Rank rank, Where where) const = 0;
  // Until the buffers of the run before the last may be overwritten.
  virtual void settle(uint64_t run) = 0;
  virtual void wait(Rank rank, uint64_t value) = 0;
  virtual void signal(uint64_t value) = 0;
  // The call's last run is over. `signalled`: the others have been told, because one waits for it.
  virtual void end(uint64_t value, bool signalled) = 0;
  virtual void launch(const Rows& rows) = 0;

  Rows& rows() { return rows_; }  // of the move that is being put together; keeps its memory

 private:
  Group& group_;
  Rows rows_;
};

}  // namespace pycollect::shm
