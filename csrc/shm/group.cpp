#include "group.h"

#include "../plan/error.h"
#include "meeting.h"

namespace pycollect::shm {
namespace {

int checked_world(Rank rank, int world) {
  require(world >= 1 && world <= kMostRanks, "a pycollect group has 1 to ", kMostRanks,
          " ranks, not ", world);
  require(rank >= 0 && rank < world, "rank ", rank, " is not in a group of ", world);
  return world;
}

// Also in what was not checked on its way here.
Extents checked(const Extents& sizes) {
  for (const auto& [what, bytes] : {std::pair{"slot_bytes", sizes.slot_bytes},
                                    {"mailbox_bytes", sizes.mailbox_bytes},
                                    {"arena_bytes", sizes.arena_bytes},
                                    {"deck_bytes", sizes.deck_bytes}})
    require(bytes <= kMostBytes, what, " is ", bytes, "; it must be at most ", kMostBytes);
  return sizes;
}

}  // namespace

Group::Group(Board& board, Rank rank, int world, Settings settings)
    : rank_(rank),
      world_(checked_world(rank, world)),
      settings_(std::move(settings)),
      layout_(checked({world, settings_.slot_bytes, settings_.mailbox_bytes, settings_.arena_bytes,
                       settings_.deck_bytes})),
      seen_(std::make_unique<std::atomic<uint64_t>[]>(world)) {
  try {
    meet(board);
  } catch (const std::exception& error) {  // the others may have seen this rank there
    if (broken_)
      broken_->say(Breakage::lost, text("rank ", rank_, " gave up: ", error.what()), nullptr);
    throw;
  }
}

void Group::meet(Board& board) {
  Meeting meeting(board, rank_, world_, settings_, {broken_, peers_});
  const auto prepare = [&](std::shared_ptr<Segment> segment, uint64_t nonce) {
    adopt(std::move(segment));
    Control& control = *reinterpret_cast<Control*>(base_);
    control.nonces[rank_].store(nonce);
    peers_ = std::make_unique<Peers>(control, world_, rank_);
    commit();
  };
  const std::vector<Introduction> ranks = meeting.share(layout_.total, prepare);
  require_one_memory(ranks);
  crowded_ = world_ > (settings_.cores > 0 ? settings_.cores : shared_cores(ranks));
  // Now that all have committed theirs: everything that a collective touches but the arenas.
  segment_->touch(0, layout_.arenas);
  note_core();
}

void Group::adopt(std::shared_ptr<Segment> segment) {
  segment_ = std::move(segment);
  base_ = segment_->data();
  lines_ = reinterpret_cast<Line*>(base_ + layout_.lines);
  segment_->commit(0, Layout::up(sizeof(Control)));
  broken_ = std::make_unique<Broken>(reinterpret_cast<Control*>(base_)->breakage, settings_.name);
}

// What is this rank's to commit: its slots, and rank 0 what is everybody's. After its lock is held,
// as a process can be killed for want of memory here.
void Group::commit() {
  if (rank_ == 0) segment_->commit(0, layout_.slots);
  segment_->commit(layout_.slot(rank_, 0), 2 * layout_.slot_stride);
}

void Group::require_one_memory(const std::vector<Introduction>& ranks) const {
  const Control& control = *reinterpret_cast<const Control*>(base_);
  for (Rank r = 0; r < world_; ++r)
    if (control.nonces[r].load() != ranks[r].nonce)
      throw CollectiveError(text("the ranks of group '", settings_.name,
                                 "' were handed different memory: are they on one host?"));
}

uint64_t Group::left() const {
  uint64_t left = 0;
  for (Rank r = 0; r < world_; ++r)
    if (lines_[r].left.load(std::memory_order_acquire) != 0) left |= uint64_t{1} << r;
  return left;
}

Group::~Group() { leave(); }

void Group::leave() noexcept {
  if (!origin_.is_here()) return;
  lines_[rank_].left.store(1, std::memory_order_seq_cst);
  wake_everybody();
}

Description& Group::description(Rank r, uint64_t call) const {
  return *reinterpret_cast<Description*>(base_ + layout_.description(r, call));
}

void Group::require_whole(const Occasion& occasion) const {
  if (!origin_.is_here()) [[unlikely]]
    throw CollectiveError(text(broken_->name(occasion), ": this process is a forked child of rank ",
                               rank_, ", and not a rank itself; make a group of its own in it"));
  if (broken_->yes()) [[unlikely]]
    broken_->rethrow(occasion);
}

void Group::abort(const std::string& why) {
  if (!origin_.is_here()) return;
  broken_->say(Breakage::lost, text("rank ", rank_, " aborted the group: ", why), nullptr);
  wake_everybody();
}

void Group::wake_everybody() const {
  for (Rank r = 0; r < world_; ++r) wake_sleepers(lines_[r].done);
}

}  // namespace pycollect::shm
