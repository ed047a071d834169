// Cause board: where the ranks of several hosts publish why a group is aborted, in the store with
// which it was made. Connections close at an abort, so a rank of another host knows only that one
// closed, and looks here for the reason. The store may be gone with its host: no call blocks long,
// and none accesses a store whose server does not answer, because torch logs that.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../../group/failures.h"

namespace pycollect::dist {

class CauseBoard {
 public:
  explicit CauseBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  // Publishes the cause, unless another rank has published one.
  void publish(const ipc::AbortCause& cause) const;
  std::optional<ipc::AbortCause> find() const;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace pycollect::dist
