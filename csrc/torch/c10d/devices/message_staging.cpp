// See message_staging.h.
#include "message_staging.h"

#include <algorithm>

namespace pycollect::dist {
namespace {

// A tensor over a part of a contiguous one's storage, which keeps that. Not through the dispatcher,
// whose modes may put something without memory in its place.
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

shm::Span MessageStaging::enter(const at::Tensor& tensor, bool reads, bool writes) {
  constexpr std::size_t kUnit = 4096;  // a piece begins at a page
  on_ = {tensor.device()};
  tensor_ = tensor;
  reads_ = reads;
  if (writes) tensor_.mutable_data_ptr();  // which memory it has is settled by that
  bytes_ = tensor.nbytes();
  const std::size_t share = (bytes_ + kMostPieces - 1) / kMostPieces;
  piece_ = std::max(kPieceBytes, (share + kUnit - 1) / kUnit * kUnit);
  dense_ = tensor.is_contiguous() ? tensor : devices_->new_dense(tensor, tensor.device());
  pinned_ = devices_->new_pinned(tensor);
  return {static_cast<std::byte*>(pinned_.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

// What is read leaves behind what is on the caller's stream, and nothing comes between its pieces:
// when the first has arrived, the device is at the others.
void MessageStaging::depart() {
  if (!reads_) {
    left_ = devices_->mark(on_[0]);
    return;
  }
  if (!dense_.is_same(tensor_)) devices_->copy_out({tensor_, dense_});
  for (std::size_t at = 0; at < bytes_; at += piece_) {
    const std::size_t end = std::min(at + piece_, bytes_);
    devices_->copy_out({part_of(dense_, at, end), part_of(pinned_, at, end)});
    pieces_.push_back(devices_->mark(on_[0]));
  }
}

std::size_t MessageStaging::arrived_bytes() {
  while (arrived_ < pieces_.size() && pieces_[arrived_]->reached()) ++arrived_;
  return std::min(arrived_ * piece_, bytes_);
}

void MessageStaging::forward(std::size_t moved) {
  const std::size_t end = whole_pieces(moved);
  if (end <= forwarded_) return;
  if (forwarded_ == 0) devices_->follow(on_[0], *left_);
  const Way way{part_of(dense_, forwarded_, end), part_of(pinned_, forwarded_, end)};
  landed_ = devices_->finish(on_[0], {way}, {});
  forwarded_ = end;
}

void MessageStaging::land(const shm::Occasion&) {
  if (!reads_) {
    forward(bytes_);
    if (!dense_.is_same(tensor_)) landed_ = devices_->finish(on_[0], {{tensor_, dense_}}, {dense_});
  }
  let_go();
}

void MessageStaging::join() {
  if (landed_) landed_->hold_current(on_[0]);
}

void MessageStaging::let_go() {
  tensor_.reset();
  dense_.reset();
  pinned_.reset();
}

}  // namespace pycollect::dist
