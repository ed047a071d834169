// Transport interface of collectives between processes: a staging buffer of each rank that all
// ranks can access, the peers' tensors if they lie in such memory, signals that publish a rank's
// progress, and launches that move elements. The ranks of one host have shm_transport.h; over
// several hosts, hosts/hosts_transport.h adds what goes between them.
#pragma once
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "../plan/select.h"
#include "agreement.h"
#include "rank_program.h"

namespace pycollect::ipc {

class ChunkLoop;

// One instruction of a piece, split into rows where any operand continues in another tensor.
class Rows {
 public:
  struct RowView {
    void* const* at;           // [operand]: addresses, in the instruction's order
    std::size_t begin, count;  // elements, numbered through all rows
  };

  void clear(const Instruction& instruction) {
    instruction_ = &instruction;
    ends_.clear();
  }
  // Adds a row and returns its operand addresses, to be filled in before `close` sets its end.
  void** open() {
    const std::size_t width = instruction_->operands.size(), used = ends_.size() * width;
    if (at_.size() < used + width) at_.resize(used + width);
    return at_.data() + used;
  }
  void close(std::size_t end) { ends_.push_back(end); }

  const Instruction& instruction() const { return *instruction_; }
  std::size_t size() const { return ends_.size(); }
  std::size_t count() const { return ends_.back(); }  // elements
  RowView operator[](std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends_[i - 1];
    return {at_.data() + i * instruction_->operands.size(), begin, ends_[i] - begin};
  }
  std::size_t find(std::size_t element) const {  // the row that contains the element
    return std::upper_bound(ends_.begin(), ends_.end(), element) - ends_.begin();
  }

 private:
  const Instruction* instruction_ = nullptr;
  std::vector<void*> at_;  // never shrinks, so that a small call does not initialize it
  std::vector<std::size_t> ends_;
};

// The transport of one rank, used by one call at a time. `wait`, `wait_for_previous` and `launch`
// throw as Group::await does.
class Transport {
 public:
  // `hosts` must outlive the process; null: the group's ranks are the whole world.
  explicit Transport(Group& group, const Hosts* hosts = nullptr)
      : group_(group),
        hosts_(hosts),
        rank_(group.world_rank(group.rank())),
        world_(hosts != nullptr ? hosts->world() : group.world()) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  Group& group() const { return group_; }  // the ranks of this host
  const Hosts* hosts() const { return hosts_; }
  Rank rank() const { return rank_; }
  int world() const { return world_; }

  // Topology for the selection of an algorithm: through staging buffers, or directly in tensors.
  virtual Topology topology(bool in_tensors) const = 0;
  // Returns whether the selected algorithm must add in rank order; see SelectionKey.
  virtual bool keeps_order() const { return true; }
  // Returns true if it is worthwhile to check whether all ranks can access the tensors in place.
  // `bytes`: size of all blocks.
  virtual bool may_use_tensors(std::size_t bytes) const = 0;
  // Returns the registered offset by which peers address this memory of this rank; none: peers
  // cannot access it.
  virtual std::optional<uint64_t> registered_offset(const std::byte* at) const = 0;

  virtual std::size_t buffer_bytes() const = 0;
  virtual uint64_t next_run() const = 0;

  // Begins a call; both arguments must live until it has ended. Throws TypeError for a reduction
  // that the dtype does not support.
  virtual void begin(const CollectiveRequest& request, const OpContext& context) = 0;
  // Checks that all ranks issued the same call, and may run the loop's prologue before. Throws
  // std::invalid_argument on all ranks alike if the calls differ.
  virtual Agreement agree(const CallFingerprint& mine, ChunkLoop& loop) = 0;
  // Prepares regions of the staging buffers before the call is published. `irregular`: other ranks
  // may need another size. Throws std::runtime_error if there is no memory for them.
  virtual void reserve(const RankProgram&, const Group::StagingRegions&, bool /*irregular*/) {}
  // Extends an agreement of this host's ranks to all hosts, with the data that `loop`, if given,
  // can send along. Throws std::invalid_argument on all ranks alike if the hosts' calls differ.
  virtual Agreement confirm(const CallFingerprint&, const Agreement& of_host, const OpContext&,
                            ChunkLoop* /*loop*/) {
    return of_host;
  }
  // Called after an agreement on several requests at once has thrown. Returns true if every rank of
  // all hosts has as many requests as this one and no rank has refused.
  virtual bool all_publish_as_many(const CallFingerprint& mine) const {
    return ipc::all_publish_as_many(group_, mine);
  }
  // Tells the other hosts that the ranks of this one do not make the call, for the reason `why`.
  virtual void reject(const CallFingerprint&, const OpContext&, std::string_view /*why*/) {}

  // Checks that the exposed tensors of all ranks can be accessed in place. `bytes`: size of all
  // blocks.
  virtual void check_exposed(std::size_t bytes) = 0;

  // Staging buffer of a rank of this host for a run: two alternate, so that a rank can fill one
  // while peers still read the other.
  virtual std::byte* buffer(Rank rank, uint64_t run) const = 0;
  // The exposed input or output of a rank.
  virtual std::byte* tensor(Rank rank, OperandBuffer where) const = 0;
  // Waits until every rank has finished `run` - 2, whose staging buffers the run overwrites.
  virtual void wait_for_previous(uint64_t run) = 0;
  virtual void wait(Rank rank, uint64_t value) = 0;
  virtual void signal(uint64_t value) = 0;
  // Ends the call's last run. `signalled`: `value` has been signalled, because a rank waits for it.
  virtual void end(uint64_t value, bool signalled) = 0;
  virtual void launch(const Rows& rows) = 0;

  // Transfers between hosts: see Wire.
  virtual void send(const HostTransfer&, const std::byte*, std::size_t) { require_hosts(); }
  virtual void receive(const HostTransfer&, std::byte*, std::size_t) { require_hosts(); }
  virtual void await_receive(const HostTransfer&) { require_hosts(); }
  virtual void await_sends() { require_hosts(); }

  Rows& rows() { return rows_; }  // rows of the instruction being built; reuses memory

 private:
  static void require_hosts() { throw std::logic_error("all ranks are on one host"); }

  Group& group_;
  const Hosts* const hosts_;
  const Rank rank_;
  const int world_;
  Rows rows_;
};

}  // namespace pycollect::ipc
