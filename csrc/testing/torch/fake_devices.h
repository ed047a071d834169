// Devices that are not there, for tests: CPU tensors as if they were on one, with a caller's stream
// and the group's own, whose work is done as late as a device may do it, or as early. What is read
// too soon is poison, what is sent back too soon is refused, and so is what CUDA would refuse.
#pragma once
#include <set>
#include <string>

#include "../../torch/c10d/devices/devices.h"
#include "fake_gpu.h"

namespace pycollect::dist {

class FakeDevices final : public Devices, public std::enable_shared_from_this<FakeDevices> {
 public:
  // `slabs`: processes can reach each other's memory on them.
  FakeDevices(bool eager, bool slabs);

  bool serves(const at::Tensor& tensor) const override;
  bool has(at::Device device) const override { return device.is_cpu(); }
  bool is_capturing(at::Device device) override;
  at::Tensor new_pinned(const at::Tensor& like) override;
  void copy_out(const Way& way) override;
  void compute(const at::Tensor& into, const at::Tensor& from, const Computation& how) override;
  std::unique_ptr<Mark> mark(at::Device device) override;
  void follow(at::Device device, Mark& after) override;
  std::unique_ptr<Mark> finish(at::Device device, const std::vector<Way>& ways,
                               const std::vector<at::Tensor>& kept) override;
  std::shared_ptr<slabs::Gpu> gpu() override { return gpu_; }
  slabs::Stream stream(at::Device device) override;
  at::Tensor new_dense(const at::Tensor& like, at::Device device) override;
  at::Tensor new_in_tract(const std::shared_ptr<slabs::Tracts>& tracts, at::Device device,
                          int64_t count, at::ScalarType type) override;
  void drop_pools() override {}  // each tensor has a tract of its own
  std::shared_ptr<Devices> twin() override;
  void with_results(c10::ArrayRef<at::Device> devices, c10::function_ref<void()> act) override;
  void complete(c10::ArrayRef<at::Device> devices, c10::function_ref<void()> act) override;

  // The scenery.
  void put_on_host(const at::Tensor& tensor);               // this one is an ordinary CPU tensor
  void fill_later(const at::Tensor& tensor, double value);  // the caller's stream does
  void use_second_stream(bool on);  // of the caller's: it is the current one
  void finish_caller();             // its first stream does all that it has
  // ... or comes to nothing more, or only so many pieces of work.
  void stall(bool on, int after);
  void capture(bool on);   // the caller captures
  void fail_call(int in);  // so many more calls go well, and then one does not
  // Otherwise whoever has joined results, or has their future, looks at them at once, which takes
  // an empty stream.
  void look(bool on);
  std::vector<std::string> trace() const;
  int pinned() const;  // how often there was pinned memory asked for
  const std::shared_ptr<FakeGpu>& slabs() const { return gpu_; }

 private:
  friend class FakeTwin;
  class Point;

  // With a stream of the group's that is named.
  void follow_on(std::size_t stream, Mark& after);
  std::unique_ptr<Mark> finish_on(std::size_t stream, const std::vector<Way>& ways,
                                  const std::vector<at::Tensor>& kept);
  void with_results_of(std::size_t stream, c10::function_ref<void()> act);
  void complete_of(std::size_t stream, c10::function_ref<void()> act);
  std::size_t current() const;                   // the calling thread's stream
  void require_kept(const at::Tensor& t) const;  // for that, if it is the group's
  void may_fail(const char* call, bool in_capture);

  const std::shared_ptr<FakeStreams> streams_;
  const std::shared_ptr<FakeGpu> gpu_;
  std::mutex& mutex_;
  std::vector<c10::Storage> on_host_;
  std::set<const void*> leaving_;  // pinned memory that is yet to be filled
  // What a stream of the group's was told to keep from others, for as long as it is somebody's.
  std::vector<std::pair<std::size_t, c10::weak_intrusive_ptr<c10::StorageImpl>>> kept_;
  std::vector<std::string> trace_;
  std::size_t second_ = FakeStreams::kCaller, current_ = FakeStreams::kCaller;
  bool captured_ = false, looks_ = true;
  int fail_in_ = -1, pinned_ = 0;
};

}  // namespace pycollect::dist
