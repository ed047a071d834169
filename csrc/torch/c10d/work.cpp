// See work.h. A work that ran on its caller's thread has no owner, and needs no lock.
#include "work.h"

#include <algorithm>

#include "../../plan/error.h"
#include "gil.h"

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
    throw CollectiveError(text(name(), ": the group has been destroyed"));
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
    future_->setErrorIfNeeded(
        std::make_exception_ptr(CollectiveError(text(name(), ": the group has been destroyed"))));
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

std::string CallQueue::describe(GroupWork& work) {
  std::string description = text(work.name(), " #", work.getSequencenumber());
  const char* before = ", which rank ";
  const std::vector<Rank> missing = this->missing();
  for (Rank r : missing) description += text(std::exchange(before, " and "), r);
  return missing.empty() ? description
                         : description + (missing.size() == 1 ? " has" : " have") + " not begun,";
}

}  // namespace pycollect::dist
