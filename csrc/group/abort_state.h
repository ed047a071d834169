// Abort state of a group. The rank that detects a failure publishes the cause once in the shared
// memory, and every rank throws the same message.
#pragma once
#include <string>

#include "segment_layout.h"
#include "wait.h"

namespace pycollect::ipc {

struct AbortCause {
  uint32_t kind = AbortRecord::lost;  // or timed_out
  std::string text = {};
  uint64_t first_run = 0;  // the calls before this run are spared
};

class AbortState {
 public:
  AbortState(AbortRecord& record, std::string group) : record_(record), group_(std::move(group)) {}

  bool is_aborted() const {
    return record_.state.load(std::memory_order_acquire) != AbortRecord::healthy;
  }
  // Whether the group's abort ends the call that begins with this run.
  bool ends(uint64_t run) const {
    return is_aborted() && run + 1 >= record_.first_run.load(std::memory_order_acquire);
  }
  // Aborts the group; if it is aborted already, keeps that cause, with the lower first run.
  // `found_in` is the operation that detected the failure, or null.
  void set(const AbortCause& cause, const OpContext* found_in);
  // Throws the published cause as PeerLost or Timeout.
  [[noreturn]] void rethrow(const OpContext& context) const;
  [[noreturn]] void rethrow() const;  // for failures during construction of the group
  AbortCause cause() const;           // of an aborted group
  std::string name(const OpContext& context) const;  // "all_reduce #17 of group 'default'"

 private:
  uint32_t wait_for_cause() const;
  [[noreturn]] void fail(uint32_t kind, const std::string& where, const std::string& since) const;

  AbortRecord& record_;
  const std::string group_;
};

}  // namespace pycollect::ipc
