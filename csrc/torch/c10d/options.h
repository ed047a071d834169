// What a group is made with beyond what torch asks: `pycollect.distributed.Options`, for
// `pg_options=`.
#pragma once
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../../shm/settings.h"
#include "devices/ladder.h"

namespace pycollect::dist {

inline constexpr const char* kBackendName = "pycollect";

struct Options final : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds limit = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, limit) {}

  std::string algorithm = {};  // of every collective that has one of this name; empty: chosen
  std::size_t slot_bytes = shm::Settings{}.slot_bytes;
  std::optional<std::size_t> arena_bytes = {};  // of one rank: address space; default: the arena's
  // Of a GPU's memory for each rank. A piece of a large message is half of it, and what a piece
  // costs besides its bytes, some 20 us of hand-overs, is then a few percent; a guess.
  std::size_t slab_bytes = 32 << 20;
  std::string cuda_sync = kBestRung;         // how tensors on GPUs are served
  std::shared_ptr<TorchRuntime> torch = {};  // in place of torch's own, for tests

  // What newer torch overrides, so that a group that is split off has its own.
  virtual c10::intrusive_ptr<c10d::Backend::Options> clone() const {
    return c10::make_intrusive<Options>(*this);
  }
};

}  // namespace pycollect::dist
