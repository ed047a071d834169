// Group options beyond torch's own: `pycollect.distributed.Options`, passed as `pg_options=`.
#pragma once
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../group/group.h"
#include "../../plan/dtype.h"
#include "../torch_runtime.h"

namespace pycollect::dist {

inline constexpr const char* kBackendName = "pycollect";
inline constexpr const char* kOneHost = "one";

struct Options final : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds limit = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, limit) {}

  std::string algorithm = {};  // used by every collective that has it; empty: automatic
  // Of reductions: a name of kFoldOrderNames.
  std::string order = name(FoldOrder::rank);
  // Size of each of a rank's two staging buffers in host memory; none: default.
  std::optional<std::size_t> buffer_bytes = {};
  // Address space of each rank's symmetric heap; none: default.
  std::optional<std::size_t> symmetric_heap_bytes = {};
  // How ranks on several hosts work together: "exact", with the bits of one host, or "one": not.
  std::string hosts = "exact";
  bool is_default = false;   // the group is torch's default one, with which its store ends
  std::string version = {};  // of pycollect, and the commit of its build
  // Makes the process group of all ranks of the world for what goes between hosts.
  std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store>, int rank,
                                                  int world, std::chrono::milliseconds)>
      gloo = {};
  std::shared_ptr<TorchRuntime> torch = {};  // replaces torch's runtime in tests

  // Newer torch calls this override, so that a split-off group has its own options.
  virtual c10::intrusive_ptr<c10d::Backend::Options> clone() const {
    return c10::make_intrusive<Options>(*this);
  }
};

}  // namespace pycollect::dist
