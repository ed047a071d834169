// What a group is made with: the same on all ranks, but for the name and the time limit.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace pycollect::shm {

class Segment;

struct Settings {
  std::string name = "default";  // of the group, for messages
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  std::size_t slot_bytes = 512 << 10;
  std::size_t mailbox_bytes = 0;
  std::size_t arena_bytes = 0;
  std::size_t deck_bytes = 0;
  std::string terms = {};  // what else must be the same, for people: " name=value" each
  int cores = 0;           // that the ranks share; 0: those that they may run on
  // Ranks that are threads of one process can be given one mapping of Layout::total bytes, so that
  // a sanitizer sees what they do to each other.
  std::shared_ptr<Segment> segment = {};
};

}  // namespace pycollect::shm
