// Settings of a group. The sizes and `common_settings` must be equal on all ranks.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "wait.h"

namespace pycollect::ipc {

class Segment;

struct GroupSettings {
  std::string name = "default";  // the group's name in messages
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  // Sizes of parts of the segment, as in SegmentSizes. Of the last four, 0 omits the part.
  std::size_t buffer_bytes = 512 << 10;
  std::size_t mailbox_bytes = 0;
  std::size_t mailbox_header_bytes = 0;  // committed with the group; the rest when it is used
  std::size_t symmetric_heap_bytes = 0;
  std::size_t exposed_bytes = 0;
  // Other settings that must be equal on all ranks, as text: " name=value" each.
  std::string common_settings = {};
  // The ranks' numbers in a world of several hosts, then those of ranks on other hosts; empty: the
  // group is the world.
  std::vector<int> world_ranks = {};
  bool one_host = true;  // false: ranks on several hosts are no error, but SeveralHosts
  // How long a waiting rank yields its core before it sleeps.
  std::chrono::microseconds yield_time = kYieldTime;
  // Called by waiting threads every kSignalInterval, and may throw: for signals that the user's
  // program handles. Null: none.
  void (*check_signals)() = nullptr;
  // Segment of SegmentLayout::total bytes that is mapped already, for ranks that are threads of one
  // process: in one mapping, a sanitizer sees the accesses of all ranks. Null: rank 0 creates it.
  std::shared_ptr<Segment> segment = {};
};

}  // namespace pycollect::ipc
