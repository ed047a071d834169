// See meeting.h. Each station is a thing that a rank tries alone and then hears of all whether it
// worked; a device that does not come to an end is given up, with all that it may still touch.
#include "meeting.h"

#include <algorithm>
#include <cstring>

#include "../plan/error.h"
#include "trial.h"

namespace pycollect::slabs {
namespace {

template <std::size_t n>
void write(std::array<char, n>& to, std::string_view from) {
  to = {};
  std::memcpy(to.data(), from.data(), std::min(from.size(), n - 1));
}

class Meeting {
 public:
  Meeting(const Ask& ask, const shm::Occasion& occasion)
      : ask_(ask),
        occasion_(occasion),
        group_(*ask.group),
        deck_(group_.deck(), group_.world()),
        mine_(deck_.berth(group_.rank())),
        station_(mine_.stations.load()) {}

  Found run() {
    std::string why = share_memory();
    if (why.empty()) why = try_streams();
    if (why.empty()) return {make_dock(), {}};
    let_go();
    return {{}, why};
  }

  // Lets go of what it has, but for what a device that does not come to an end may still touch.
  void let_go() noexcept {
    const bool stuck = trial_ != nullptr && !trial_->drain();
    trial_.reset();
    if (adopted_ && stuck) adopted_->abandon();
    if (slab_ && stuck) slab_->abandon();
    slab_.reset();
    adopted_.reset();
  }

 private:
  // Does it, and hears of all how it went: what was wrong, by rank; nothing if nothing was.
  template <class F>
  std::string together(F&& act) {
    Verdict& verdict = mine_.verdicts[++station_ & 1];
    verdict.fine = true;
    try {
      act();
    } catch (const std::exception& error) {
      verdict.fine = false;
      write(verdict.why, error.what());
    }
    mine_.stations.store(station_, std::memory_order_release);
    hear();
    std::string why;
    for (Rank r = 0; r < group_.world(); ++r) {
      const Verdict& said = deck_.berth(r).verdicts[station_ & 1];
      if (!said.fine)
        why += text(why.empty() ? "" : "; ", "rank ", r, ": ", shm::sentence(said.why));
    }
    return why;
  }

  void hear() {
    const auto behind = [&] {
      std::vector<Rank> ranks;
      for (Rank r = 0; r < group_.world(); ++r)
        if (deck_.berth(r).stations.load(std::memory_order_acquire) < station_) ranks.push_back(r);
      return ranks;
    };
    group_.await([&] { return behind().empty(); }, behind, occasion_);
  }

  std::string share_memory() {
    const Device device = ask_.stream.device;
    std::string why = together([&] {
      write(mine_.gpu, ask_.gpu->identity(device));
      slab_ = std::make_unique<Slab>(
          *ask_.gpu, SlabTerms{device, group_.rank(), group_.world(), ask_.slot_bytes});
      adopted_ = std::make_unique<Adopted>(*ask_.gpu, device, deck_);
      trial_ = std::make_unique<Trial>(*ask_.gpu, *slab_, deck_, adopted_->base());
      trial_->clear();
      mine_.handle = slab_->handle();
      watch_ = std::make_unique<Watch>(ask_.group, deck_);
    });
    if (!why.empty()) return why;
    why = together([&] {
      for (Rank r = 0; r < group_.world(); ++r)
        if (r != group_.rank()) slab_->open(r, deck_.berth(r).handle);
    });
    if (why.empty()) why = together([&] { trial_->write_everywhere(); });
    if (why.empty()) why = together([&] { trial_->read_everywhere(); });
    return why;
  }

  std::string try_streams() {
    std::string why = together([&] { trial_->tell(); });
    if (why.empty()) why = together([&] { trial_->await_everybody(); });
    return why;
  }

  std::shared_ptr<Dock> make_dock() {
    const bool stuck = !trial_->drain();
    trial_.reset();
    if (stuck) slab_->abandon();  // in the end: the device may never let go of it
    if (stuck) adopted_->abandon();
    together([] {});  // before anybody counts in earnest
    const auto same = [&](Rank r) { return deck_.berth(r).gpu == mine_.gpu; };
    bool apart = false;
    for (Rank r = 0; r < group_.world(); ++r) apart |= !same(r);
    return std::make_shared<Dock>(Dock::Parts{ask_.group, ask_.gpu, ask_.stream, deck_, ask_.tracts,
                                              std::move(slab_), std::move(adopted_),
                                              std::move(watch_), apart});
  }

  const Ask& ask_;
  const shm::Occasion& occasion_;
  shm::Group& group_;
  const Deck deck_;
  Berth& mine_;
  uint64_t station_;
  std::unique_ptr<Adopted> adopted_;
  std::unique_ptr<Slab> slab_;
  std::unique_ptr<Trial> trial_;
  std::unique_ptr<Watch> watch_;
};

}  // namespace

Found meet(const Ask& ask, const shm::Occasion& occasion) {
  Meeting meeting(ask, occasion);
  try {
    return meeting.run();
  } catch (...) {
    meeting.let_go();
    throw;
  }
}

}  // namespace pycollect::slabs
