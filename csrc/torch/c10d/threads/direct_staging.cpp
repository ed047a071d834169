// See direct_staging.h.
#include "direct_staging.h"

#include <algorithm>

namespace pycollect::dist {

void DirectStaging::add_device(at::Device device) {
  if (std::find(on_.begin(), on_.end(), device) == on_.end()) on_.push_back(device);
}

void DirectStaging::add_whole(const at::Tensor& tensor) {
  add_device(tensor.device());
  tensors_.push_back(tensor);
}

ipc::BufferSegment DirectStaging::add_tensor(const at::Tensor& tensor, bool reads, bool writes) {
  const at::Device device = tensor.device();
  add_device(device);
  if (tensor.numel() == 0) return {nullptr, 0};
  at::Tensor dense = tensor;
  if (!tensor.is_contiguous()) {
    dense = devices_->torch().empty(tensor.sizes(), tensor.scalar_type(), device);
    if (reads) in_.push_back({tensor, dense});
    if (writes) out_.push_back({tensor, dense});
    tensors_.push_back(tensor);
  }
  tensors_.push_back(dense);
  return {static_cast<std::byte*>(const_cast<void*>(dense.const_data_ptr())),
          static_cast<std::size_t>(dense.numel())};
}

void DirectStaging::begin_copy_in() {
  for (const CopyPair& pair : in_) devices_->torch().copy(pair.dense, pair.tensor);
  in_.clear();
  inputs_.clear();
  for (at::Device d : on_) inputs_.push_back(devices_->record_event(d));
}

void DirectStaging::wait_for_inputs() {
  for (std::size_t i = 0; i < on_.size(); ++i) {
    inputs_[i]->block_current(on_[i]);
    const cuda::Stream stream = devices_->torch().current_stream(on_[i]);
    for (const at::Tensor& t : tensors_)
      if (t.device() == on_[i]) devices_->torch().record_stream(t, stream);
  }
}

void DirectStaging::begin_copy_out() {
  for (const CopyPair& pair : out_) devices_->torch().copy(pair.tensor, pair.dense);
  out_.clear();
  for (at::Device d : on_) outputs_.push_back(devices_->record_event(d));
}

bool DirectStaging::outputs_ready() {
  return std::all_of(outputs_.begin(), outputs_.end(), [](const auto& e) { return e->reached(); });
}

void DirectStaging::wait_on_current_streams() {
  for (std::size_t i = 0; i < outputs_.size(); ++i) outputs_[i]->block_current(on_[i]);
}

void DirectStaging::complete(c10::function_ref<void()> act) {
  devices_->complete(on_, [&] {
    wait_on_current_streams();
    act();
  });
}

void DirectStaging::release() {
  tensors_.clear();
  in_.clear();
  out_.clear();
}

}  // namespace pycollect::dist
