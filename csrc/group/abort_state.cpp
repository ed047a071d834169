#include "abort_state.h"

#include <algorithm>
#include <cstring>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// How long a rank that finds the group aborted waits for the cause text, which is written at once
// unless its writer is killed.
constexpr std::chrono::milliseconds kCauseTimeout{100};

template <std::size_t n>
void write(std::array<char, n>& to, const std::string& from) {
  std::memcpy(to.data(), from.data(), std::min(from.size(), n - 1));  // keeps the final zero
}

}  // namespace

std::string AbortState::name(const OpContext& context) const {
  return text(context.operation, " #", context.call, " of group '", group_, "'");
}

void AbortState::set(const AbortCause& cause, const OpContext* found_in) {
  uint64_t first = record_.first_run.load();
  while ((first == 0 || cause.first_run + 1 < first) &&
         !record_.first_run.compare_exchange_weak(first, cause.first_run + 1)) {
  }
  uint32_t healthy = AbortRecord::healthy;
  if (!record_.state.compare_exchange_strong(healthy, AbortRecord::being_written)) return;
  if (found_in != nullptr) {
    record_.call = found_in->call;
    write(record_.operation, found_in->operation);
  }
  write(record_.cause, cause.text);
  record_.state.store(cause.kind, std::memory_order_release);
}

void AbortState::rethrow(const OpContext& context) const {
  const uint32_t kind = wait_for_cause();
  const std::string found_in = read_text(record_.operation);
  const bool here = found_in == context.operation && record_.call == context.call;
  const bool is_known = here || found_in.empty();
  fail(kind, name(context),
       is_known ? "" : text("broken since ", found_in, " #", record_.call, ": "));
}

AbortCause AbortState::cause() const {
  const uint32_t kind = wait_for_cause();
  if (kind == AbortRecord::being_written) return {AbortRecord::lost, "a rank died"};
  return {kind, read_text(record_.cause), record_.first_run.load() - 1};
}

void AbortState::rethrow() const { fail(wait_for_cause(), text("group '", group_, "'"), ""); }

// Waits for the cause text. Returns the kind of failure, or `being_written` if the text has not
// come within kCauseTimeout.
uint32_t AbortState::wait_for_cause() const {
  const Deadline end = Clock::now() + kCauseTimeout;
  uint32_t state = AbortRecord::being_written;
  while ((state = record_.state.load(std::memory_order_acquire)) == AbortRecord::being_written &&
         Clock::now() < end)
    sched_yield();
  return state;
}

void AbortState::fail(uint32_t kind, const std::string& where, const std::string& since) const {
  if (kind == AbortRecord::being_written)
    throw PeerLost(text(where, ": a rank died while it published why it aborted the group"));
  const std::string why = text(where, ": ", since, read_text(record_.cause));
  if (kind == AbortRecord::timed_out) throw Timeout(why);
  throw PeerLost(why);
}

}  // namespace pycollect::ipc
