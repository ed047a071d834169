// What a rank says of itself before the ranks share memory, and what all conclude from hearing
// everybody: each draws the same conclusion, so that all go on or none.
#pragma once
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "../plan/plan.h"
#include "settings.h"

namespace pycollect::shm {

struct Introduction {
  static constexpr int kCoreWords = 16;  // as many as the C library's set of cores has: 1024 bits

  std::string host, boot;  // its name, for people; what the kernel drew when it started
  pid_t pid = 0;
  uint64_t pid_space = 0;  // numbers mean the same to those that have the same; 0: not known
  bool can_watch = false;  // has descriptors of processes
  uid_t user = 0;
  uint64_t user_space = 0;  // as pid_space, of users
  uint64_t nonce = 0;
  std::string hatch;                            // see Hatch; empty where there are none
  std::array<uint64_t, kCoreWords> cores = {};  // that it may run on; none: not known
  std::string terms;                            // that all must agree on

  std::string encode() const;
  static Introduction decode(const std::string& text);
};

// Of this process; the hatch is added by who has one.
Introduction introduce(const Settings& settings, int world);

// Throws std::invalid_argument that names hosts and ranks.
void require_one_host(const std::vector<Introduction>& ranks, const std::string& group);
// What can have kept ranks from sharing: that they are run by several users, which works only where
// one may open what is the other's, as root may. Empty if they are not.
std::string unlike_users(const std::vector<Introduction>& ranks);
// Throws std::invalid_argument that names what differs.
void require_same_terms(const std::vector<Introduction>& ranks, const std::string& group);
bool can_all_watch(const std::vector<Introduction>& ranks);
std::vector<pid_t> pids(const std::vector<Introduction>& ranks);
int shared_cores(const std::vector<Introduction>& ranks);

}  // namespace pycollect::shm
