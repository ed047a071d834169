// How ranks that know of each other only through a board come to share memory. Rank 0 makes it and
// says where it is to be had; each takes it and introduces itself, and says whether it could. Each
// reads everything that was said, so all agree without another word.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "board.h"
#include "introduction.h"
#include "outlet.h"
#include "segment.h"

namespace pycollect::shm {

class Meeting {
 public:
  // Says which of the others has gone, if one has, and how.
  using Lost = std::function<std::string()>;
  Meeting(Board& board, Rank rank, int world, const Settings& settings, Lost lost);

  // Makes the rank ready in the memory, and writes its nonce there.
  using Preparation = std::function<void(std::shared_ptr<Segment>, uint64_t nonce)>;
  // Returns when all have the memory and are ready in it; what they are is returned. Throws what
  // Group's constructor says; CollectiveError that says who cannot have it and why; PeerLost when
  // somebody has died or given up meanwhile.
  std::vector<Introduction> share(std::size_t bytes, const Preparation& preparation);

 private:
  std::shared_ptr<Segment> take(Introduction& mine, std::size_t bytes);
  Descriptor fetch_from(const Introduction& owner) const;
  std::vector<std::string> read_all();
  [[noreturn]] void time_out(const std::vector<Rank>& missing) const;

  Board& board_;
  Rank rank_;
  int world_;
  const Settings& settings_;
  Deadline deadline_;
  Lost lost_;
  uint64_t network_space_ = 0;
  std::optional<Outlet> outlet_;  // rank 0's
};

}  // namespace pycollect::shm
