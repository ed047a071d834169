// See work.h. A work that ran on its caller's thread has no owner, and needs no lock.
#include "work.h"

#include <algorithm>

#include "../../plan/error.h"
#include "binder.h"
#include "interpreter.h"

namespace pycollect::dist {

c10::intrusive_ptr<Future> new_future(std::vector<at::Device> devices) {
  std::erase_if(devices, [](at::Device d) { return d.is_cpu(); });  // torch has no CPU streams
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                     std::move(devices));
}

void complete(Future& future, const Tensors& results, std::exception_ptr error,
              TensorStaging* staging) {
  const auto mark = [&] { future.markCompleted(c10::IValue(results)); };
  if (error)
    future.setErrorIfNeeded(std::move(error));
  else if (staging == nullptr)
    mark();
  else
    try {
      staging->complete(mark);
    } catch (const std::exception&) {  // an error of the device
      future.setErrorIfNeeded(std::current_exception());
    }
}

// Sparse tensors on devices have no staging.
std::vector<at::Device> GroupWork::devices() {
  std::vector<at::Device> devices;
  if (staging() != nullptr) devices = staging()->on();
  for (const at::Tensor& t : result())
    if (t.is_sparse() && std::ranges::find(devices, t.device()) == devices.end())
      devices.push_back(t.device());
  return devices;
}

bool GroupWork::isCompleted() {
  if (!is_done()) {
    if (const auto owner = this->owner()) owner->progress(*this);
  }
  return is_done() && (error_ || staging() == nullptr || staging()->outputs_ready());
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  const auto owner = this->owner();
  std::optional<InFlightGuard> in_flight;
  if (owner) in_flight.emplace();
  if (staging()) check_no_capture(*staging(), name());
  if (owner) {
    if (!is_limit(timeout))
      owner->wait(*this);
    else if (!owner->wait_until(*this, ipc::deadline_after(timeout)))
      throw Timeout(text(owner->describe(*this), " has not finished within the timeout of ",
                         std::chrono::duration<double>(timeout).count(), " seconds"));
  } else if (!is_done()) {
    throw group_destroyed(name());
  }
  if (const auto error = exception()) std::rethrow_exception(error);
  if (staging()) staging()->wait_on_current_streams();
  return true;
}

void GroupWork::abort() {
  if (is_done()) return;
  if (const auto owner = this->owner()) owner->abort(text(name(), " was aborted"));
}

c10::intrusive_ptr<Future> GroupWork::finish(std::exception_ptr error) {
  error_ = std::move(error);
  state_.store(WorkState::done, std::memory_order_release);
  return future_;
}

c10::intrusive_ptr<Future> GroupWork::getFuture() {
  static std::mutex of_works_without_owner;
  const GilRelease gil_release;
  const auto owner = this->owner();
  if (owner) owner->fork_guard().require_not_forked(name());
  if (owner && !is_done()) owner->progress(*this);
  bool was_done = false;
  {
    const std::lock_guard lock(owner ? owner->mutex() : of_works_without_owner);
    if (future_) return future_;
    future_ = new_future(devices());
    was_done = is_done();
    if (!was_done && owner) {
      due_ = ipc::deadline_after(limit());
      owner->on_future_taken();
    }
  }
  if (!was_done && !owner)
    future_->setErrorIfNeeded(std::make_exception_ptr(group_destroyed(name())));
  if (was_done) complete(*future_, result(), error_, staging());
  return future_;
}

GroupCall CollectiveWork::detach() {
  GroupCall used{.collective = call_.collective, .name = call_.name};
  used.requests.swap(call_.requests);
  used.held.swap(call_.held);
  used.fills.swap(call_.fills);
  used.copies.swap(call_.copies);
  used.sparse.swap(call_.sparse);
  used.event.swap(call_.event);
  return used;
}

void CollectiveWork::release() {
  detach();
  if (call_.staging) call_.staging->release();
}

std::string describe(const GroupWork& work, const std::vector<Rank>& missing) {
  std::string description = text(work.name(), " #", work.getSequencenumber());
  const char* before = ", which rank ";
  for (Rank r : missing) description += text(std::exchange(before, " and "), r);
  return missing.empty() ? description
                         : description + (missing.size() == 1 ? " has" : " have") + " not begun,";
}

bool check_message(const P2POp& op, int world, DeviceOps& devices) {
  if (op.peer) check_rank(*op.peer, world, op.name(), op.receives ? "src" : "dst");
  require(op.tag >= 0, op.name(), ": tag is ", op.tag, "; it must not be negative");
  const ArgumentName label{op.name(), "tensor"};
  const bool on_device =
      check_operand(op.tensor, op.receives ? AccessMode::write : AccessMode::read, label, devices);
  dtype_number(op.tensor, label);
  return on_device;
}

MessageWork::MessageWork(const P2POp& op, uint64_t number, Rank rank,
                         std::shared_ptr<TensorStaging> staging, std::weak_ptr<WorkOwner> owner,
                         std::shared_ptr<WorkOwner> kept)
    : op(op),
      rank(rank),
      data(op.tensor),
      event(ProfilerEvent::begin(op.receives && !op.peer ? "recvAnySource" : op.name(), op.tensor)),
      number_(number),
      staging_(std::move(staging)),
      owner_(std::move(owner)),
      kept_(std::move(kept)) {}

int MessageWork::sourceRank() const {
  const Rank known = source;
  return known >= 0 ? known : op.peer.value_or(-1);
}

ipc::Envelope MessageWork::envelope() const {
  return {static_cast<uint64_t>(op.tensor.nbytes()), dtype_number(op.tensor, {op.name(), "tensor"}),
          static_cast<uint32_t>(op.tag)};
}

std::string MessageWork::describe(const std::string& of_group) const {
  const Rank peer = sourceRank();
  return text(name(), " #", number_, op.receives ? " from " : " to ",
              peer >= 0 ? text("rank ", peer) : "any rank", of_group, " with tag ", op.tag, " on ",
              op.tensor.sizes(), " ", dtype_name(op.tensor));
}

}  // namespace pycollect::dist
