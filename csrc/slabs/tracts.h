// Memory of a rank on its GPUs, beside its slab, that the other ranks reach: more comes with time
// and in no collective. Its owner puts up a notice in the memory that the processes share; who
// wants to reach it opens it then, once, and notes that there, so that nothing is freed that
// somebody has open. Knows no tensors: others divide a tract among them.
#pragma once
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../shm/group.h"
#include "deck.h"

namespace pycollect::slabs {

// A byte of a rank's tract, as any rank names it: the tract's number, then the offset in it.
using Place = uint64_t;

// All of a rank's in one group, on whatever devices. Thread-safe; exists before the ranks have
// agreed on anything, and stays as long as somebody has memory of it.
class Tracts {
 public:
  Tracts(std::shared_ptr<Gpu> gpu, const shm::Group& group);
  ~Tracts() = default;  // after `close`; what is still there stays until the process ends
  Tracts(const Tracts&) = delete;
  Tracts& operator=(const Tracts&) = delete;

  // At least so many bytes, of which nothing else is part. Where it cannot be handed over, or there
  // is no notice left for it, it is memory without places. Throws std::runtime_error when there is
  // none, or after `close`.
  std::byte* add(Device device, std::size_t bytes);
  // Why there is such memory since this was asked last, in sentences: `add` may be called by an
  // allocator that holds a lock, so it tells nobody by itself.
  std::vector<std::string> unreachable();
  // What `add` has returned; the device is done with it. Used again, or freed when nobody has it
  // open; also after `close`.
  void give_back(std::byte* memory) noexcept;

  // Of this rank's memory, if all of these bytes lie in one tract that others can reach.
  std::optional<Place> place_of(const std::byte* at, std::size_t bytes) const;
  // A place of another rank's as a device of this process finds it: opens it when it is the first
  // there. Throws std::runtime_error, with CUDA's reason, when that does not work.
  std::byte* at(Device device, Rank owner, Place place);

  // Ends it, when no device of this process has to do with the others' memory any more: lets go of
  // that, and frees what no tensor is in.
  void close();

  struct Use {
    std::size_t used, kept;  // bytes given out; free, but kept
  };
  Use use() const;

 private:
  struct Own {
    Device device;
    std::size_t bytes;
    int number;  // of its notice; kNone: there is none
    bool given;  // out
  };
  struct Opened {
    Device device;
    Rank owner;
    int number;
    auto operator<=>(const Opened&) const = default;
  };
  static constexpr int kNone = -1;

  std::byte* reuse(Device device, std::size_t bytes);
  int put_up(Device device, std::byte* memory, std::size_t bytes);
  bool take_down(int number);
  std::byte* open(Device device, Rank owner, int number);
  void close_others();
  std::shared_ptr<shm::Segment> segment() const;
  void free(Device device, std::byte* memory) const noexcept;

  const std::shared_ptr<Gpu> gpu_;
  const shm::Origin origin_;
  const Deck deck_;
  const Rank rank_;
  const int world_;

  mutable std::mutex mutex_;  // of what follows; never held in a call of the GPU's
  // That the notices are in. None: the group has ended.
  std::shared_ptr<shm::Segment> segment_;
  std::map<std::byte*, Own> own_;
  uint64_t numbers_ = 0;  // a bit for each that is taken
  std::vector<std::string> unreachable_;
  bool closed_ = false;

  std::mutex opening_;  // of what follows
  std::map<Opened, std::byte*> opened_;
  bool let_go_ = false;
};

}  // namespace pycollect::slabs
