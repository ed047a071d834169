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
#include "broken.h"
#include "introduction.h"
#include "life.h"
#include "outlet.h"
#include "segment.h"

namespace pycollect::shm {

class Meeting {
 public:
  // What tells of the others in the memory, when a preparation has made it.
  struct Signs {
    const std::unique_ptr<Broken>& broken;
    const std::unique_ptr<Peers>& peers;
  };
  Meeting(Board& board, Rank rank, int world, const Settings& settings, const Signs& signs);

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
  bool is_vain() const;
  [[noreturn]] void say_why_vain() const;
  [[noreturn]] void fail(uint32_t kind, const std::string& cause) const;

  Board& board_;
  Rank rank_;
  int world_;
  const Settings& settings_;
  Deadline deadline_;
  const Signs signs_;
  uint64_t network_space_ = 0;
  std::optional<Outlet> outlet_;  // rank 0's
};

}  // namespace pycollect::shm
