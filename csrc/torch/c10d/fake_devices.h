// Devices that are not there, for tests: CPU tensors as if they were on one, with a caller's stream
// and the group's own, whose work is done as late as a device may do it, or as early. What is read
// too soon is poison, what is sent back too soon is refused, and so is what CUDA would refuse.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <string>

#include "devices.h"

namespace pycollect::dist {

class FakeDevices final : public Devices, public std::enable_shared_from_this<FakeDevices> {
 public:
  explicit FakeDevices(bool eager) : eager_(eager) {}

  bool serves(const at::Tensor& tensor) const override;
  bool is_capturing(at::Device device) override;
  at::Tensor new_pinned(const at::Tensor& like) override;
  void copy_out(const Way& way) override;
  std::unique_ptr<Mark> mark(at::Device device) override;
  std::unique_ptr<Mark> copy_back(at::Device device, const std::vector<Way>& ways,
                                  Mark& after) override;
  void with_results(c10::ArrayRef<at::Device> devices, c10::function_ref<void()> act) override;

  // The scenery.
  void put_on_host(const at::Tensor& tensor);               // this one is an ordinary CPU tensor
  void fill_later(const at::Tensor& tensor, double value);  // the caller's stream does
  void stall(bool on);     // the caller's stream comes to nothing more
  void capture(bool on);   // the caller captures
  void fail_call(int in);  // so many more calls go well, and then one does not
  std::vector<std::string> trace() const;

 private:
  enum Name { kCaller, kBack, kStreams };
  struct Stream {
    std::deque<std::function<bool()>> work = {};  // false: it cannot be done yet
    std::size_t done = 0, enqueued = 0;
  };
  class Point;

  void may_fail(const char* call, bool in_capture);
  void enqueue(Name stream, std::function<bool()> work);
  bool advance(Name stream, std::size_t to);
  bool step(Name stream);

  const bool eager_;
  mutable std::mutex mutex_;
  std::array<Stream, kStreams> streams_;
  std::vector<c10::Storage> on_host_;
  std::set<const void*> leaving_;  // pinned memory that is yet to be filled
  std::vector<std::string> trace_;
  bool stalled_ = false, captured_ = false;
  int fail_in_ = -1;
};

}  // namespace pycollect::dist
