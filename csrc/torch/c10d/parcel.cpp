// See parcel.h. The first time that a rank fetches something of another's, it reads what the sender
// has written in front of it as well: that memory opens is no proof that it is the same memory.
#include "parcel.h"

#include <ATen/ops/from_blob.h>

#include "../../plan/error.h"

namespace pycollect::dist {
namespace {

enum Field : std::size_t { kData, kStamp, kStampAt };  // of a ticket
constexpr int64_t kStamps = 2;                         // words

// As a tensor's elements would lie there, in logical order.
at::Tensor over(std::byte* memory, const at::Tensor& like) {
  return at::for_blob(memory, like.sizes())
      .options(like.options())
      .target_device(like.device())
      .make_tensor();
}

at::Tensor stamps_at(std::byte* memory, at::Device device) {
  return at::for_blob(memory, {kStamps})
      .options(at::TensorOptions(at::kLong).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

shm::Span OutParcel::enter(const at::Tensor& tensor, bool, bool) {
  on_ = {tensor.device()};
  tensor_ = tensor;
  dense_ = terms_.lent ? tensor : over(terms_.where.memory + kHeadBytes, tensor);
  return {nullptr, static_cast<std::size_t>(tensor.numel())};
}

void OutParcel::depart() {
  if (terms_.stamp != 0)
    devices_->fill(stamps_at(terms_.where.memory, on_[0]), static_cast<int64_t>(terms_.stamp));
  if (!terms_.lent) devices_->copy_out({tensor_, dense_});
  left_ = devices_->mark(on_[0]);
}

std::shared_ptr<Transfer> OutParcel::post(shm::Mailbox& mailbox, std::optional<Rank>,
                                          const shm::Envelope& envelope) {
  shm::Ticket ticket = {};
  ticket[kData] = terms_.where.place + head();
  ticket[kStamp] = terms_.stamp;
  ticket[kStampAt] = terms_.where.place;
  return mailbox.send_parcel(terms_.to, envelope, ticket);
}

bool OutParcel::advance(shm::Mailbox& mailbox, Transfer& transfer, const shm::Occasion&) {
  if (transfer.done() || supplied_) return false;
  if (!staged_) {
    if (transfer.turn() != shm::Mailbox::Turn::supply) return false;
    stage(transfer);
  }
  if (!staged_->reached()) return true;
  supplied_ = true;
  mailbox.supply(transfer, static_cast<const std::byte*>(pinned_.const_data_ptr()));
  return false;
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
  if (left_ == nullptr) return;  // it did not come to that, and who knows what has the block
  const auto block = terms_.lent ? std::nullopt : std::optional(terms_.where);
  all->let_linger({staged_ ? staged_ : left_, {dense_, pinned_}, block});
  tensor_.reset();
  dense_.reset();
  pinned_.reset();
  left_.reset();
  all->sweep();
}

shm::Span InParcel::enter(const at::Tensor& tensor, bool, bool) {
  on_ = {tensor.device()};
  tensor_ = tensor;
  return {nullptr, static_cast<std::size_t>(tensor.numel())};
}

std::shared_ptr<Transfer> InParcel::post(shm::Mailbox& mailbox, std::optional<Rank> peer,
                                         const shm::Envelope& envelope) {
  return mailbox.receive_parcel(peer, envelope);
}

bool InParcel::advance(shm::Mailbox& mailbox, Transfer& transfer, const shm::Occasion& occasion) {
  if (transfer.done()) return false;
  if (!fetches_) {
    if (transfer.turn() != shm::Mailbox::Turn::fetch) return false;
    const Rank from = transfer.peer();
    const auto ticket = transfer.ticket();
    all_->require_there(from, occasion);
    if (!ticket || !begin(*ticket, from)) {
      receive_bytes(mailbox, transfer, ticket.has_value());
      return false;
    }
  }
  if (!end_->reached()) return true;
  fetches_ = false;
  const Rank from = transfer.peer();
  all_->require_there(from, occasion);
  if (is_right()) {
    if (stamp_ != 0) all_->add(all_->verified_, from);
    mailbox.fetched(transfer);
  } else {
    all_->say_vain(from, "what was read there is not what it has written");
    receive_bytes(mailbox, transfer, true);
  }
  return false;
}

// False: the memory cannot be opened.
bool InParcel::begin(const shm::Ticket& ticket, Rank from) {
  if (Parcels::has(all_->vain_, from)) return false;
  slabs::Tracts& tracts = *all_->ladder_->tracts();
  const slabs::Stream stream = devices_->stream(on_[0]);
  const auto at = [&](Field field) { return tracts.at(stream.device, from, ticket[field]); };
  std::byte *data = nullptr, *stamps = nullptr;
  try {
    data = at(kData);
    if (ticket[kStamp] != 0 && !Parcels::has(all_->verified_, from)) stamps = at(kStampAt);
  } catch (const std::runtime_error& error) {
    all_->say_vain(from, error.what());
    return false;
  }
  devices_->follow(on_[0], *left_);
  if (stamps != nullptr) {
    stamp_ = ticket[kStamp];
    found_ = devices_->new_pinned(stamps_at(stamps, on_[0]));
    devices_->gpu()->read(stream, found_.mutable_data_ptr(), stamps, found_.nbytes());
  }
  const at::Tensor theirs = over(data, tensor_);
  end_ = devices_->finish(on_[0], {{tensor_, theirs}}, {theirs});
  fetches_ = true;
  return true;
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
  if (!room_.defined()) return;
  devices_->follow(on_[0], *left_);
  end_ = devices_->finish(on_[0], {{tensor_, room_}}, {});
}

void InParcel::join() {
  if (end_) end_->hold_current();
}

void InParcel::let_go() {
  const auto all = std::exchange(all_, nullptr);
  if (fetches_) all->let_linger({end_, {found_}});  // it was cut short
  tensor_.reset();
  found_.reset();
  room_.reset();
}

}  // namespace pycollect::dist
