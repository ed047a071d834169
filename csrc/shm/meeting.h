// How ranks that know of each other only through a board come to share memory. They introduce
// themselves, rank 0 offers memory in one way after the other, and all say whether they got it;
// each reads everything that was said, so all agree without another word.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "board.h"
#include "hatch.h"
#include "introduction.h"
#include "life.h"
#include "segment.h"

namespace pycollect::shm {

class Meeting {
 public:
  // Returns when all have introduced themselves; throws what Group's constructor says.
  Meeting(Board& board, Rank rank, int world, const Settings& settings);

  const std::vector<Introduction>& ranks() const { return ranks_; }
  // Returns when all have the memory and each has done its `preparation` in it without an
  // exception; that is called again with other memory when somebody's failed. Throws
  // CollectiveError that says whose and how, PeerLost when somebody has died meanwhile.
  using Preparation = std::function<void(std::shared_ptr<Segment>)>;
  void share(std::size_t bytes, const Preparation& preparation);

 private:
  struct Way;
  bool attempt(const Way& way, std::size_t bytes, const Preparation& preparation);
  std::string offer(const Way& way, std::size_t bytes, std::shared_ptr<Segment>& segment);
  std::shared_ptr<Segment> accept(const Way& way, std::size_t bytes);
  bool all_have(const Way& way, const std::string& outcome);
  std::vector<std::string> read_all(const std::string& phase, const std::vector<Rank>& from);
  std::vector<Rank> everybody() const;
  [[noreturn]] void time_out(const std::vector<Rank>& missing) const;
  void require_all_alive() const;

  Board& board_;
  Rank rank_;
  int world_;
  const Settings& settings_;
  Deadline deadline_;
  std::optional<Hatch> hatch_;
  std::vector<Introduction> ranks_;
  std::unique_ptr<Peers> watched_;  // where that is possible before there is memory
  std::string failures_;
};

}  // namespace pycollect::shm
