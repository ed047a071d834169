// See message_staging.h.
#include "message_staging.h"

#include <algorithm>

namespace pycollect::dist {
namespace {

// Returns a tensor over a part of a contiguous tensor, sharing its storage. Bypasses the
// dispatcher, whose modes may substitute a tensor without memory.
at::Tensor part_of(const at::Tensor& whole, std::size_t begin, std::size_t end) {
  const c10::DispatchKeySet keys(whole.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  at::Tensor part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), keys,
                                                             caffe2::TypeMeta::Make<uint8_t>());
  c10::TensorImpl* const made = part.unsafeGetTensorImpl();
  const auto first = static_cast<int64_t>(whole.storage_offset() * whole.element_size() + begin);
  made->set_storage_offset(first);
  made->set_sizes_contiguous({static_cast<int64_t>(end - begin)});
  return part;
}

}  // namespace

ipc::BufferSegment MessageStaging::add_tensor(const at::Tensor& tensor, bool reads, bool writes) {
  constexpr std::size_t kPageBytes = 4096;  // a fragment begins at a page
  on_ = {tensor.device()};
  tensor_ = tensor;
  reads_ = reads;
  if (writes) tensor_.mutable_data_ptr();  // a copy-on-write tensor gets memory of its own now
  bytes_ = tensor.nbytes();
  const std::size_t share = (bytes_ + kMaxFragments - 1) / kMaxFragments;
  fragment_bytes_ = std::max(kFragmentBytes, (share + kPageBytes - 1) / kPageBytes * kPageBytes);
  dense_ = tensor.is_contiguous() ? tensor : devices_->new_dense(tensor, tensor.device());
  pinned_ = devices_->new_pinned(tensor);
  return {static_cast<std::byte*>(pinned_.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

// The copies of a send follow the caller's stream with nothing between them: when the first
// fragment has arrived, the device is copying the others.
void MessageStaging::begin_copy_in() {
  if (!reads_) {
    requested_at_ = devices_->record_event(on_[0]);
    return;
  }
  if (!dense_.is_same(tensor_)) devices_->copy_in({tensor_, dense_});
  for (std::size_t at = 0; at < bytes_; at += fragment_bytes_) {
    const std::size_t end = std::min(at + fragment_bytes_, bytes_);
    devices_->copy_in({part_of(dense_, at, end), part_of(pinned_, at, end)});
    fragments_.push_back(devices_->record_event(on_[0]));
  }
}

std::size_t MessageStaging::arrived_bytes() {
  while (arrived_ < fragments_.size() && fragments_[arrived_]->reached()) ++arrived_;
  return std::min(arrived_ * fragment_bytes_, bytes_);
}

void MessageStaging::forward(std::size_t moved) {
  const std::size_t end = whole_fragments(moved);
  if (end <= forwarded_) return;
  if (forwarded_ == 0) devices_->wait_for(on_[0], *requested_at_);
  const CopyPair pair{part_of(dense_, forwarded_, end), part_of(pinned_, forwarded_, end)};
  outputs_ready_ = devices_->finish(on_[0], {pair}, {});
  forwarded_ = end;
}

void MessageStaging::begin_copy_out(const ipc::OpContext&) {
  if (!reads_) {
    forward(bytes_);
    if (!dense_.is_same(tensor_))
      outputs_ready_ = devices_->finish(on_[0], {{tensor_, dense_}}, {dense_});
  }
  release();
}

void MessageStaging::wait_on_current_streams() {
  if (outputs_ready_) outputs_ready_->block_current(on_[0]);
}

void MessageStaging::release() {
  tensor_.reset();
  dense_.reset();
  pinned_.reset();
}

}  // namespace pycollect::dist
