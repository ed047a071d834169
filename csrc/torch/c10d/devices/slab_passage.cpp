// The rungs above host staging: the transport of GPUs finds the tensors where they are, on the
// group's stream, which comes behind the caller's. Those that are not contiguous there, or are on
// another device, go through a copy that is. The host waits for no device. What others may touch
// where it is belongs to nobody else until they have.
#include <algorithm>

#include "../../../slabs/gpu_transport.h"
#include "ladder.h"

namespace pycollect::dist {
namespace {

class SlabPassage final : public Passage {
 public:
  SlabPassage(std::shared_ptr<Devices> devices, std::shared_ptr<slabs::Dock> dock)
      : devices_(std::move(devices)), dock_(std::move(dock)), transport_(dock_) {}

  shm::Span enter(const at::Tensor& tensor, bool reads, bool writes) override;
  void depart() override;
  bool arrived() override;
  void land(const shm::Occasion& occasion) override { send(occasion, back_); }
  void cut_short(const shm::Occasion& occasion) override { send(occasion, {}); }
  bool landed() override { return errand_->ended(); }
  std::exception_ptr failure() const override { return errand_ ? errand_->tell() : nullptr; }
  void join() override;
  void let_go() override;
  shm::Transport* transport() override { return &transport_; }
  const std::vector<at::Device>& on() const override { return on_; }
  Devices& devices() const override { return *devices_; }

 private:
  void visit(at::Device device);
  void send(const shm::Occasion& occasion, const std::vector<Way>& back);
  std::shared_ptr<void> lent() const;
  // As torch names the device of the slab, which is that of the first tensor of the group's.
  at::Device home() const;

  const std::shared_ptr<Devices> devices_;
  const std::shared_ptr<slabs::Dock> dock_;
  slabs::GpuTransport transport_;
  std::vector<at::Device> on_;
  std::vector<at::Tensor> kept_;  // that the executor touches
  std::vector<Way> out_, back_;
  std::vector<std::unique_ptr<Mark>> left_;  // [device of on_]
  std::shared_ptr<Mark> end_;
  std::shared_ptr<slabs::Errand> errand_;
};

at::Device SlabPassage::home() const {
  return {on_[0].type(), static_cast<c10::DeviceIndex>(dock_->stream().device)};
}

void SlabPassage::visit(at::Device device) {
  if (std::find(on_.begin(), on_.end(), device) == on_.end()) on_.push_back(device);
}

// A copy is memory of the caller's stream beside the slab: whoever had it before may still use it.
shm::Span SlabPassage::enter(const at::Tensor& tensor, bool reads, bool writes) {
  visit(tensor.device());
  if (tensor.numel() == 0) return {nullptr, 0};
  const at::Device slab = home();
  at::Tensor found = tensor;
  if (!tensor.is_contiguous() || tensor.device() != slab) {
    visit(slab);
    found = devices_->new_dense(tensor, slab);
    if (reads) out_.push_back({tensor, found});
    if (writes) back_.push_back({tensor, found});
  }
  kept_.push_back(found);
  // Not through mutable_data_ptr: what is only read is not to be told that it was written.
  auto* const at = static_cast<std::byte*>(const_cast<void*>(found.const_data_ptr()));
  return {writes ? static_cast<std::byte*>(found.mutable_data_ptr()) : at,
          static_cast<std::size_t>(tensor.numel())};
}

void SlabPassage::depart() {
  for (const Way& way : out_) devices_->copy_out(way);
  for (at::Device d : on_) left_.push_back(devices_->mark(d));
}

// The stream waits for the caller's, and not the host.
bool SlabPassage::arrived() {
  for (std::size_t i = 0; i < left_.size(); ++i) devices_->follow(home(), *left_[i]);
  left_.clear();
  return true;
}

// All that lies where the others reach it: they may have been lent it, however the call went.
std::shared_ptr<void> SlabPassage::lent() const {
  auto found = std::make_shared<std::vector<at::Tensor>>();
  for (const at::Tensor& t : kept_)
    if (dock_->tracts().place_of(static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()))
      found->push_back(t);
  if (found->empty()) return {};
  return found;
}

void SlabPassage::send(const shm::Occasion& occasion, const std::vector<Way>& back) {
  std::shared_ptr<void> lent = this->lent();
  try {
    end_ = devices_->finish(home(), back, kept_);
    errand_ = dock_->send(occasion, [end = end_] { return end->reached(); }, lent);
  } catch (...) {
    slabs::keep_for_ever(std::move(lent));
    throw;
  }
  let_go();
}

// Also on devices beside the slab's, whose tensors are copied back in the end.
void SlabPassage::join() {
  for (at::Device d : on_) end_->hold_current(d);
  dock_->free_returned();
}

void SlabPassage::let_go() {
  kept_.clear();
  out_.clear();
  back_.clear();
}

}  // namespace

std::shared_ptr<Passage> pass_through_slabs(std::shared_ptr<Devices> devices,
                                            std::shared_ptr<slabs::Dock> dock) {
  return std::make_shared<SlabPassage>(std::move(devices), std::move(dock));
}

}  // namespace pycollect::dist
