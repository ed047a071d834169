// Which devices reach each other's memory: what the driver says, and what came of trying. A pair
// that is said to work and does not is treated as one that does not, and reported once. Keeps the
// answers; who is asked, and how it is tried, is handed in.
#pragma once
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "api.h"

namespace pycollect::cuda {

struct PeerAccess {
  bool asked = false;       // what the driver says
  std::string defect = {};  // what went wrong when it was tried; empty for who need not be
  bool works() const { return asked && defect.empty(); }
};

class Peers {
 public:
  struct Questions {
    std::function<bool(Device from, Device to)> ask;
    std::function<std::string(Device from, Device to)> try_out;  // the defect; never a pair twice
    std::function<void(const std::string& line)> warn;
  };
  explicit Peers(Questions questions) : questions_(std::move(questions)) {}

  // Can what runs on `from` read and write the memory of `to`? Any thread; what a question throws
  // passes through, and the pair is asked again the next time.
  PeerAccess access(Device from, Device to);

 private:
  const Questions questions_;
  std::mutex mutex_;
  std::map<std::pair<Device, Device>, PeerAccess> known_;
};

}  // namespace pycollect::cuda
