// See parcel.h. The first time that a rank fetches something of another's, it reads what the sender
// has written in front of it as well: that memory opens is no proof that it is the same memory.
#include "parcel.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "../../../plan/error.h"

namespace pycollect::dist {
namespace {

enum Field : std::size_t { kData, kPart, kStamp, kStampAt };  // of a ticket
constexpr int64_t kStamps = 2;                                // words

at::Tensor blob(void* memory, at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  return at::for_blob(memory, sizes)
      .options(at::TensorOptions(type).device(device))
      .target_device(device)
      .make_tensor();
}

// As a tensor's elements would lie there, in logical order.
at::Tensor over(std::byte* memory, const at::Tensor& like) {
  return blob(memory, like.sizes(), like.scalar_type(), like.device());
}

at::Tensor stamps_at(std::byte* memory, at::Device device) {
  return blob(memory, {kStamps}, at::kLong, device);
}

at::Tensor bytes_at(std::byte* memory, std::size_t bytes, at::Device device) {
  return blob(memory, {static_cast<int64_t>(bytes)}, at::kByte, device);
}

// Not through mutable_data_ptr: what is only read is not to be told that it was written.
std::byte* address(const at::Tensor& t) {
  return static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr()));
}

}  // namespace

OutParcel::~OutParcel() {
  if (all_ && !departed_ && !terms_.lent) all_->depot()->give_back(terms_.where);
}

shm::Span OutParcel::enter(const at::Tensor& tensor, bool, bool) {
  on_ = {tensor.device()};
  tensor_ = tensor;
  bytes_ = tensor.nbytes();
  if (!in_parts())
    dense_ = terms_.lent ? tensor : over(terms_.where.memory + kHeadBytes, tensor);
  else
    dense_ = tensor.is_contiguous() ? tensor : devices_->new_dense(tensor, tensor.device());
  return {nullptr, static_cast<std::size_t>(tensor.numel())};
}

void OutParcel::depart() {
  departed_ = true;
  std::byte* const block = terms_.where.memory;
  if (terms_.stamp != 0)
    devices_->fill(stamps_at(block, on_[0]), static_cast<int64_t>(terms_.stamp));
  if (!dense_.is_same(tensor_)) devices_->copy_out({tensor_, dense_});
  if (in_parts())
    devices_->copy_out({bytes_at(address(dense_), terms_.part, on_[0]),
                        bytes_at(block + kHeadBytes, terms_.part, on_[0])});
  left_ = devices_->mark(on_[0]);
}

std::shared_ptr<Transfer> OutParcel::post(shm::Mailbox& mailbox, std::optional<Rank>,
                                          const shm::Envelope& envelope) {
  shm::Ticket ticket = {};
  ticket[kData] = terms_.where.place + head();
  ticket[kPart] = terms_.part;
  ticket[kStamp] = terms_.stamp;
  ticket[kStampAt] = terms_.where.place;
  return mailbox.send_parcel(terms_.to, envelope, ticket);
}

bool OutParcel::advance(shm::Mailbox& mailbox, Transfer& transfer, const shm::Occasion&) {
  if (transfer.done() || supplied_) return false;
  const auto turn = transfer.turn();
  if (turn == shm::Mailbox::Turn::more) {
    if (!copying_) copy_next();
    copying_ = !copied_->reached();
    if (!copying_) mailbox.send_more(transfer);
    return copying_;
  }
  if (turn != shm::Mailbox::Turn::supply) return false;
  if (!staged_) stage(transfer);
  if (!staged_->reached()) return true;
  supplied_ = true;
  mailbox.supply(transfer, address(pinned_));
  return false;
}

void OutParcel::copy_next() {
  begin_ += terms_.part;
  const std::size_t bytes = std::min(terms_.part, bytes_ - begin_);
  const at::Tensor from = bytes_at(address(dense_) + begin_, bytes, on_[0]);
  const at::Tensor to = bytes_at(terms_.where.memory + kHeadBytes, bytes, on_[0]);
  devices_->follow(on_[0], *left_);
  copied_ = devices_->finish(on_[0], {{to, from}}, {from, dense_});
}

void OutParcel::stage(Transfer& transfer) {
  if (transfer.in_vain()) all_->refused_by(terms_.to);
  pinned_ = devices_->new_pinned(tensor_);
  devices_->follow(on_[0], *left_);
  staged_ = devices_->finish(on_[0], {{pinned_, dense_}}, {dense_});
}

// The receiver waits for bytes that will not come.
void OutParcel::give_up(shm::Mailbox&, Transfer&) {
  all_->group_->abort("the GPU of a rank failed in send");
}

void OutParcel::land(const shm::Occasion&) {
  if (!staged_) all_->add(all_->confirmed_, terms_.to);
}

void OutParcel::let_go() {
  const auto all = std::exchange(all_, nullptr);
  if (left_ == nullptr) return;  // a device has failed, and who knows what has the block
  const auto block = terms_.lent ? std::nullopt : std::optional(terms_.where);
  all->let_linger({staged_ ? staged_ : copied_ ? copied_ : left_, {dense_, pinned_}, block});
  tensor_.reset();
  dense_.reset();
  pinned_.reset();
  all->sweep();
}

// A tensor that is not contiguous takes a message in parts as bytes of one that is.
shm::Span InParcel::enter(const at::Tensor& tensor, bool, bool) {
  on_ = {tensor.device()};
  tensor_ = tensor;
  tensor_.mutable_data_ptr();  // which memory it has is settled by that
  dense_ = tensor.is_contiguous()           ? tensor
           : tensor.nbytes() > all_->most() ? devices_->new_dense(tensor, tensor.device())
                                            : at::Tensor();
  return {nullptr, static_cast<std::size_t>(tensor.numel())};
}

std::shared_ptr<Transfer> InParcel::post(shm::Mailbox& mailbox, std::optional<Rank> peer,
                                         const shm::Envelope& envelope) {
  return mailbox.receive_parcel(peer, envelope);
}

bool InParcel::advance(shm::Mailbox& mailbox, Transfer& transfer, const shm::Occasion& occasion) {
  if (transfer.done() || transfer.turn() != shm::Mailbox::Turn::fetch) return false;
  if (!copying_) {
    all_->require_there(transfer.peer(), occasion);
    const auto ticket = transfer.ticket();
    if (theirs_ == nullptr && (!ticket || !open(*ticket, transfer.peer()))) {
      receive_bytes(mailbox, transfer, Parcels::has(all_->vain_, transfer.peer()));
      return false;
    }
    copy_part();
    copying_ = true;
  }
  if (!end_->reached()) return true;
  copying_ = false;
  all_->require_there(transfer.peer(), occasion);
  end_part(mailbox, transfer);
  return false;
}

// False: the memory cannot be opened, or its parts not be taken.
bool InParcel::open(const shm::Ticket& ticket, Rank from) {
  if (Parcels::has(all_->vain_, from)) return false;
  part_ = std::min<std::size_t>(ticket[kPart], tensor_.nbytes());
  if (part_ < tensor_.nbytes() && !dense_.defined()) return false;
  slabs::Tracts& tracts = *all_->ladder_->tracts();
  const slabs::Stream stream = devices_->stream(on_[0]);
  try {
    std::byte* const data = tracts.at(stream.device, from, ticket[kData]);
    if (ticket[kStamp] != 0 && !Parcels::has(all_->verified_, from)) {
      std::byte* const stamps = tracts.at(stream.device, from, ticket[kStampAt]);
      stamp_ = ticket[kStamp];
      found_ = devices_->new_pinned(stamps_at(stamps, on_[0]));
      devices_->gpu()->read(stream, found_.mutable_data_ptr(), stamps, found_.nbytes());
    }
    theirs_ = data;
  } catch (const std::runtime_error& error) {
    all_->say_vain(from, error.what());
  }
  return theirs_ != nullptr;
}

void InParcel::copy_part() {
  devices_->follow(on_[0], *left_);
  if (part_ == tensor_.nbytes()) {
    const at::Tensor whole = over(theirs_, tensor_);
    end_ = devices_->finish(on_[0], {{tensor_, whole}}, {whole});
    return;
  }
  const std::size_t bytes = std::min(part_, tensor_.nbytes() - begin_);
  const at::Tensor from = bytes_at(theirs_, bytes, on_[0]);
  const at::Tensor to = bytes_at(address(dense_) + begin_, bytes, on_[0]);
  end_ = devices_->finish(on_[0], {{to, from}}, {from, dense_});
}

void InParcel::end_part(shm::Mailbox& mailbox, Transfer& transfer) {
  if (!is_right()) {
    all_->say_vain(transfer.peer(), "what was read there is not what the sender has written");
    return receive_bytes(mailbox, transfer, true);
  }
  if (stamp_ != 0) all_->add(all_->verified_, transfer.peer());
  begin_ += part_;
  mailbox.fetched(transfer, begin_ >= tensor_.nbytes());
}

bool InParcel::is_right() const {
  if (!found_.defined()) return true;
  const auto* const words = static_cast<const int64_t*>(found_.const_data_ptr());
  return words[0] == static_cast<int64_t>(stamp_) && words[1] == words[0];
}

void InParcel::receive_bytes(shm::Mailbox& mailbox, Transfer& transfer, bool never) {
  room_ = devices_->new_pinned(tensor_);
  mailbox.accept(transfer, static_cast<std::byte*>(room_.mutable_data_ptr()), never);
}

void InParcel::land(const shm::Occasion&) {
  if (room_.defined()) {
    devices_->follow(on_[0], *left_);
    end_ = devices_->finish(on_[0], {{tensor_, room_}}, {});
  } else if (part_ < tensor_.nbytes() && !dense_.is_same(tensor_)) {
    end_ = devices_->finish(on_[0], {{tensor_, dense_}}, {dense_});
  }
}

void InParcel::join() {
  if (end_) end_->hold_current(on_[0]);
}

void InParcel::let_go() {
  const auto all = std::exchange(all_, nullptr);
  if (copying_) all->let_linger({end_, {found_, dense_}});  // it was cut short
  tensor_.reset();
  dense_.reset();
  found_.reset();
  room_.reset();
}

}  // namespace pycollect::dist
