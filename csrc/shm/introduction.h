// What a rank says of itself before the ranks share memory, and what all conclude from hearing
// everybody: each draws the same conclusion, so that all go on or none.
#pragma once
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "../plan/plan.h"
#include "outlet.h"
#include "settings.h"

namespace pycollect::shm {

struct Introduction {
  static constexpr int kCoreWords = 16;  // as many as the C library's set of cores has: 1024 bits

  std::string host, boot;  // its name, for people; what the kernel drew when it started
  pid_t pid = 0;
  uid_t user = 0;
  // Names and numbers mean the same to those that have the same; 0: not known.
  uint64_t user_space = 0, network_space = 0;
  uint64_t nonce = 0;
  Outlet::Ticket ticket = {};                   // rank 0's: for the memory
  std::array<uint64_t, kCoreWords> cores = {};  // that it may run on; none: not known
  std::string terms;                            // that all must agree on
  std::string failure;                          // why it cannot share memory; empty: it can

  std::string encode() const;
  static Introduction decode(const std::string& text);
};

// Of this process, so far; what becomes of the memory is added.
Introduction introduce(const Settings& settings, int world);

// Throws std::invalid_argument that names hosts and ranks.
void require_one_host(const std::vector<Introduction>& ranks, const std::string& group);
// Throws std::invalid_argument that names what differs.
void require_same_terms(const std::vector<Introduction>& ranks, const std::string& group);
// Throws CollectiveError that names who cannot share memory, why, and what to do.
void require_shared(const std::vector<Introduction>& ranks, const std::string& group);
int shared_cores(const std::vector<Introduction>& ranks);

}  // namespace pycollect::shm
