// The twin of devices that are not there: the same books, and another stream.
#include "fake_devices.h"

namespace pycollect::dist {

class FakeTwin final : public Devices {
 public:
  FakeTwin(std::shared_ptr<FakeDevices> first, std::size_t stream)
      : first_(std::move(first)), stream_(stream) {}

  bool serves(const at::Tensor& tensor) const override { return first_->serves(tensor); }
  bool has(at::Device device) const override { return first_->has(device); }
  bool is_capturing(at::Device device) override { return first_->is_capturing(device); }
  at::Tensor new_pinned(const at::Tensor& like) override { return first_->new_pinned(like); }
  void copy_out(const Way& way) override { first_->copy_out(way); }
  void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) override {
    first_->compute(into, from, how);
  }
  std::unique_ptr<Mark> mark(at::Device device) override { return first_->mark(device); }
  void follow(at::Device, Mark& after) override { first_->follow_on(stream_, after); }
  std::unique_ptr<Mark> finish(at::Device, const std::vector<Way>& ways,
                               const std::vector<at::Tensor>& kept) override {
    return first_->finish_on(stream_, ways, kept);
  }
  std::shared_ptr<slabs::Gpu> gpu() override { return first_->gpu(); }
  slabs::Stream stream(at::Device device) override {
    return {device.index(), reinterpret_cast<void*>(stream_)};
  }
  at::Tensor new_dense(const at::Tensor& like, at::Device device) override {
    return first_->new_dense(like, device);
  }
  at::Tensor new_in_tract(const std::shared_ptr<slabs::Tracts>& tracts, at::Device device,
                          int64_t count, at::ScalarType type) override {
    return first_->new_in_tract(tracts, device, count, type);
  }
  void drop_pools() override { first_->drop_pools(); }
  std::shared_ptr<Devices> twin() override { return first_->twin(); }
  void with_results(c10::ArrayRef<at::Device>, c10::function_ref<void()> act) override {
    first_->with_results_of(stream_, act);
  }
  void complete(c10::ArrayRef<at::Device>, c10::function_ref<void()> act) override {
    first_->complete_of(stream_, act);
  }

 private:
  const std::shared_ptr<FakeDevices> first_;
  const std::size_t stream_;
};

std::shared_ptr<Devices> FakeDevices::twin() {
  const std::lock_guard lock(mutex_);
  return std::make_shared<FakeTwin>(shared_from_this(), streams_->add());
}

}  // namespace pycollect::dist
