// Sees device work through that nobody on the host waits for: when a rank dies or the time runs out
// meanwhile, it breaks the group as a host's wait would, and lets go every stream that is held up.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "../shm/group.h"
#include "deck.h"

namespace pycollect::slabs {

// The device work of one call.
class Errand {
 public:
  struct About {
    std::string operation;
    uint64_t call;
    shm::Deadline deadline;
    std::function<bool()> reached;       // has it ended? Throws what went wrong on the device
    std::vector<uint64_t> awaited = {};  // [rank]: how far its stream must come for that
  };
  // `lent`: the memory of this rank's that others touch in it, where it is.
  Errand(About about, std::shared_ptr<void> lent)
      : about_(std::move(about)), lent_(std::move(lent)) {}

  // Has it ended, well or not? From any thread.
  bool ended();
  std::exception_ptr error() const;  // null: none yet
  // The same, for whoever asked for the call: it is no longer a secret.
  std::exception_ptr tell();

 private:
  friend class Watch;
  shm::Occasion occasion() const {
    return {about_.operation.c_str(), about_.call, about_.deadline};
  }
  void fail(std::exception_ptr error);
  std::shared_ptr<void> take_lent();  // when it has ended

  const About about_;
  std::shared_ptr<void> lent_;  // the watch's
  mutable std::mutex mutex_;
  std::exception_ptr error_;
  bool told_ = false;
};

// A launch of another rank's that runs already goes on writing into what it was lent, whatever has
// failed meanwhile: such memory goes back to no allocator as long as this process lives.
void keep_for_ever(std::shared_ptr<void> lent);

class Watch {
 public:
  // With its thread: where there can be none, the ranks hear of it as they meet.
  Watch(std::shared_ptr<shm::Group> group, const Deck& deck);
  ~Watch();  // after `close`, or with nothing taken
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void take(std::shared_ptr<Errand> errand);
  // Lets go of what calls that have ended were lent. From any thread but the watch's own: to free
  // memory may wait for all streams, and nobody else lets go those that are held up.
  void free_returned();
  // Until all that it was given has ended, or else so long; then aborts the group. Takes nothing
  // more. Returns the first error that nobody has been told.
  std::exception_ptr close(std::chrono::milliseconds grace);

 private:
  using Lock = std::unique_lock<std::mutex>;
  void serve();
  void end();
  void see_through(Errand& errand);
  void let_go(Errand& errand) const;
  std::vector<Rank> missing(const Errand& errand) const;

  const std::shared_ptr<shm::Group> group_;
  const Deck deck_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Errand>> open_;
  bool closed_ = false;
  std::vector<std::shared_ptr<Errand>> failed_;
  std::vector<std::shared_ptr<void>> returned_;
  std::thread thread_;
};

}  // namespace pycollect::slabs
