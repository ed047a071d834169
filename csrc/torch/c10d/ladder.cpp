// See ladder.h. The one list of rungs.
#include "ladder.h"

#include <array>

#include "../../plan/error.h"
#include "../job.h"

namespace pycollect::dist {
namespace {

const auto& rungs() {
  static const std::array all{host_staging()};
  return all;
}

Rung rung_named(const std::string& name) {
  if (name == kBestRung) return rungs().front();
  std::string allowed = kBestRung;
  for (const Rung& r : rungs()) {
    if (name == r.name) return r;
    allowed += text(", ", r.name);
  }
  throw std::invalid_argument(text("cuda_sync is '", name, "'; allowed are ", allowed));
}

}  // namespace

std::vector<const char*> rung_names() {
  std::vector<const char*> names{kBestRung};
  for (const Rung& r : rungs()) names.push_back(r.name);
  return names;
}

void check_rung(const std::string& name) { rung_named(name); }

Ladder::Ladder(std::shared_ptr<Devices> devices, const std::string& rung)
    : devices_(std::move(devices)), rung_(rung_named(rung)) {}

void Ladder::check_no_capture(const at::Tensor& t, const Label& label) const {
  require(!devices_->is_capturing(t.device()), label.call, ": ", label, " is on ", t.device(),
          ", whose current stream is under capture, and a CUDA graph cannot hold what other "
          "processes do; call it outside of the capture");
}

std::shared_ptr<Passage> Ladder::begin() const {
  say_once(text("collectives of CUDA tensors, PYCOLLECT_CUDA_SYNC=", rung_.name, ": ", rung_.what));
  return rung_.begin(devices_);
}

void check_no_capture(const Passage& passage, const char* operation) {
  for (at::Device d : passage.on())
    require(!passage.devices().is_capturing(d), operation,
            ": wait() was called while the current "
            "stream of ",
            d, " is under capture; wait before the capture begins");
}

}  // namespace pycollect::dist
