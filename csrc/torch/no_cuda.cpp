// The answers of a build without CUDA. Tensors on a GPU are refused with the other arguments, so
// nothing else is ever asked.
#include <stdexcept>

#include "c10d/devices/devices.h"
#include "gpus.h"
#include "profiled.h"

namespace pycollect {

bool has_cuda() { return false; }
bool serves(const at::Device& device) { return device.is_cpu(); }

namespace {
[[noreturn]] void never() { throw std::logic_error("this build has no CUDA part"); }
}  // namespace

Ground ground_of(const std::vector<at::Device>&) { return Ground::shared; }
std::shared_ptr<const Compiled> compiled_for(const Choice&, const Situation&, Rank,
                                             const std::vector<at::Device>&) {
  never();
}
at::Tensor new_bytes_on_gpu(int64_t, at::Device) { never(); }
at::Tensor new_pinned_bytes(int64_t, at::Device) { never(); }
bool is_pageable(const void*) { never(); }
bool stage_all(bool) { return false; }
PeerReport peer_access(int, int) { return {}; }
void begin_range(const char*) {}
void end_range() {}
void run_on_gpus(const Job&) { never(); }
std::shared_ptr<Work> enqueue_on_gpus(Job) { never(); }

namespace dist {
namespace {

class NoDevices final : public Devices {
 public:
  bool serves(const at::Tensor&) const override { return false; }
  bool has(at::Device) const override { return false; }
  bool is_capturing(at::Device) override { never(); }
  at::Tensor new_pinned(const at::Tensor&) override { never(); }
  void copy_out(const Way&) override { never(); }
  void compute(const at::Tensor&, const at::Tensor&, const Computation&) override { never(); }
  std::unique_ptr<Mark> mark(at::Device) override { never(); }
  void follow(at::Device, Mark&) override { never(); }
  std::unique_ptr<Mark> finish(at::Device, const std::vector<Way>&,
                               const std::vector<at::Tensor>&) override {
    never();
  }
  std::shared_ptr<slabs::Gpu> gpu() override { return nullptr; }
  slabs::Stream stream(at::Device) override { never(); }
  at::Tensor new_dense(const at::Tensor&, at::Device) override { never(); }
  at::Tensor new_in_tract(const std::shared_ptr<slabs::Tracts>&, at::Device, int64_t,
                          at::ScalarType) override {
    never();
  }
  void drop_pools() override {}
  std::shared_ptr<Devices> twin() override { return std::make_shared<NoDevices>(); }
  void with_results(c10::ArrayRef<at::Device>, c10::function_ref<void()>) override { never(); }
};

}  // namespace

std::shared_ptr<Devices> torch_devices() { return std::make_shared<NoDevices>(); }

}  // namespace dist
}  // namespace pycollect
