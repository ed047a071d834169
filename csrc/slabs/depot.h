// Where messages, or the next parts of large ones, lie in GPU memory until their receivers have
// fetched them: blocks in a few tracts, each the first that is free and large enough. Bounded: a
// message for which there is no room is to go another way, and waits for nobody.
#pragma once
#include <vector>

#include "tracts.h"

namespace pycollect::slabs {

class Depot {
 public:
  // Four messages of the size of a tract or more can be under way at a time: two to each neighbour
  // in a pipeline, or one to each in a grid. A guess.
  static constexpr std::size_t kMostTracts = 4;

  // `tract_bytes`: the most that a block has room for, in whole granules.
  Depot(std::shared_ptr<Tracts> tracts, std::size_t tract_bytes)
      : tracts_(std::move(tracts)), tract_bytes_(whole_granules(tract_bytes)) {}
  Depot(const Depot&) = delete;
  Depot& operator=(const Depot&) = delete;

  struct Block {
    std::byte* memory = nullptr;
    Place place = 0;
  };
  std::size_t most() const { return tract_bytes_; }
  // None: there is no room now, or other processes cannot reach this device's memory.
  std::optional<Block> take(Device device, std::size_t bytes);
  void give_back(const Block& block) noexcept;  // nobody has to do with it any more
  // Gives back the tracts that have no block taken; the others stay until the process ends.
  void close() noexcept;

 private:
  struct Held {
    std::byte* memory;
    Device device;
    std::map<std::size_t, std::size_t> taken = {};  // bytes, by the offset: whole pages
  };
  static std::optional<std::size_t> gap(const Held& held, std::size_t bytes, std::size_t limit);
  std::optional<Block> take_from(Held& held, std::size_t bytes);
  bool grow(Device device);

  const std::shared_ptr<Tracts> tracts_;
  const std::size_t tract_bytes_;
  std::mutex mutex_;  // of what follows
  std::vector<Held> held_;
  bool grows_ = true;
};

}  // namespace pycollect::slabs
