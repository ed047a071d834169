// The ways in which a group can serve tensors on devices, the fastest first; the last works
// wherever CUDA does. Each is a file of its own that makes passages. PYCOLLECT_CUDA_SYNC names one.
#pragma once
#include <string>

#include "../arguments.h"
#include "passage.h"

namespace pycollect::dist {

struct Rung {
  const char* name;
  const char* what;  // it does: said once in the log
  std::shared_ptr<Passage> (*begin)(std::shared_ptr<Devices> devices);
};

// Copies to and from pinned memory around the executor for host memory (host_staging.cpp).
Rung host_staging();

inline constexpr const char* kBestRung = "best";
std::vector<const char*> rung_names();
// "best" or the name of one; throws std::invalid_argument, which lists them.
void check_rung(const std::string& name);

class Ladder {
 public:
  Ladder(std::shared_ptr<Devices> devices, const std::string& rung);

  bool serves(const at::Tensor& tensor) const { return devices_->serves(tensor); }
  // Throws while the current stream of the tensor's device is under capture.
  void check_no_capture(const at::Tensor& tensor, const Label& label) const;
  std::shared_ptr<Passage> begin() const;

 private:
  const std::shared_ptr<Devices> devices_;
  const Rung rung_;
};

// Throws when the calling thread captures what would have to wait for these results.
void check_no_capture(const Passage& passage, const char* operation);

}  // namespace pycollect::dist
