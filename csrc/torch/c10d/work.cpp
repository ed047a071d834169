// See work.h. A work that ran on its caller's thread has no queue, and needs no lock.
#include "work.h"

#include <algorithm>

#include "../../plan/error.h"
#include "call_queue.h"
#include "gil_release.h"
#include "in_flight_guard.h"

namespace pycollect::dist {

namespace {

c10::intrusive_ptr<Future> new_future_on(std::vector<at::Device> devices) {
  std::erase_if(devices, [](at::Device d) { return d.is_cpu(); });  // torch has no CPU streams
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                     std::move(devices));
}

// Sparse tensors on devices have no staging.
std::vector<at::Device> devices_of(const TensorStaging* staging, const Tensors& results) {
  std::vector<at::Device> devices;
  if (staging != nullptr) devices = staging->on();
  for (const at::Tensor& t : results)
    if (t.is_sparse() && std::ranges::find(devices, t.device()) == devices.end())
      devices.push_back(t.device());
  return devices;
}

}  // namespace

c10::intrusive_ptr<Future> new_future(const TensorStaging* staging, const Tensors& results) {
  return new_future_on(devices_of(staging, results));
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

void throw_unfinished(const std::string& operation, std::chrono::milliseconds timeout) {
  throw Timeout(text(operation, " has not finished within the timeout of ",
                     std::chrono::duration<double>(timeout).count(), " seconds"));
}

bool PostedWork::isCompleted() {
  if (!is_done()) give_way();
  return is_done() && (error_ || staging() == nullptr || staging()->outputs_ready());
}

std::exception_ptr PostedWork::exception() const { return is_done() ? error_ : nullptr; }

c10::intrusive_ptr<Future> PostedWork::finish(std::exception_ptr error) {
  error_ = std::move(error);
  state_.store(WorkState::done, std::memory_order_release);
  return future_;
}

c10::intrusive_ptr<Future> PostedWork::getFuture() {
  const GilRelease gil_release;
  if (!is_done()) give_way();
  bool was_done = false;
  {
    const std::lock_guard lock(mutex());
    if (future_) return future_;
    future_ = new_future(staging(), result());
    was_done = is_done();
    if (!was_done) {
      due_ = ipc::deadline_after(limit());
      count_open_futures(1);
    }
  }
  if (was_done) complete(*future_, result(), error_, staging());
  return future_;
}

std::string CollectiveWork::describe() const {
  std::string description = text(name(), " #", call_.number);
  const char* before = ", which rank ";
  const std::vector<Rank> missing = queue_->missing();
  for (Rank r : missing) description += text(std::exchange(before, " and "), r);
  return missing.empty() ? description
                         : description + (missing.size() == 1 ? " has" : " have") + " not begun,";
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  const InFlightGuard in_flight;
  if (call_.staging) check_no_capture(*call_.staging, name());
  if (!is_done()) {
    if (!is_limit(timeout))
      queue_->wait(*this);
    else if (!queue_->wait_until(*this, ipc::deadline_after(timeout)))
      throw_unfinished(describe(), timeout);
  } else if (queue_ != nullptr) {
    queue_->end_wait();
  }
  if (const auto error = exception()) std::rethrow_exception(error);
  if (call_.staging) call_.staging->wait_on_current_streams();
  return true;
}

void CollectiveWork::abort() {
  if (!is_done()) queue_->abort(text(name(), " was aborted"));
}

void CollectiveWork::give_way() { queue_->give_way(*this); }

void CollectiveWork::count_open_futures(int more) { queue_->count_open_futures(more); }

// A call that has run on its caller's thread has no queue.
std::mutex& CollectiveWork::mutex() {
  static std::mutex of_works_that_have_run;
  return queue_ ? queue_->mutex() : of_works_that_have_run;
}

Call CollectiveWork::detach() {
  Call used{.collective = call_.collective, .name = call_.name};
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

bool CoalescedWork::isCompleted() {
  for (const auto& part : parts_)
    if (!part->isCompleted()) return false;
  return true;
}

bool CoalescedWork::isSuccess() const {
  for (const auto& part : parts_)
    if (!part->isSuccess()) return false;
  return true;
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& part : parts_)
    if (auto error = part->exception()) return error;
  return nullptr;
}

Tensors CoalescedWork::result() {
  Tensors all;
  for (const auto& part : parts_)
    for (at::Tensor& t : part->result()) all.push_back(std::move(t));
  return all;
}

// Waits for all parts even if one has failed: the caller may reuse their memory afterwards.
bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = ipc::deadline_after(timeout);
  std::exception_ptr error;
  for (const auto& part : parts_) {
    auto left = timeout;
    if (is_limit(timeout))
      left = std::max(
          std::chrono::milliseconds(1),
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - ipc::Clock::now()));
    try {
      part->wait(left);
    } catch (const ipc::Interruption&) {
      throw;
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  return true;
}

void CoalescedWork::abort() {
  for (const auto& part : parts_) part->abort();
}

// The results of collectives and of messages are on streams of different DeviceOps objects. The
// joint future is completed on the streams of the last part that has device tensors, after these
// streams have waited for all parts.
c10::intrusive_ptr<Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  std::vector<at::Device> devices;
  const TensorStaging* any = nullptr;
  for (const auto& part : parts_) {
    futures.push_back(part->getFuture());
    const auto* const own = dynamic_cast<const GroupWork*>(part.get());
    if (own == nullptr) continue;
    if (own->staging()) any = own->staging();
    for (const at::Device d : devices_of(own->staging(), part->result()))
      if (std::ranges::find(devices, d) == devices.end()) devices.push_back(d);
  }
  auto joint = new_future_on(devices);
  const auto self = c10::intrusive_ptr<CoalescedWork>::unsafe_reclaim_from_nonowning(this);
  c10::collectAll(futures)->addCallback([self, joint, any, devices](Future&) {
    const auto mark = [&] { joint->markCompleted(c10::IValue(self->result())); };
    if (auto error = self->exception())
      joint->setErrorIfNeeded(std::move(error));
    else if (any == nullptr)
      mark();
    else
      any->devices().complete(devices, [&] {
        for (const auto& part : self->parts_) part->wait();
        mark();
      });
  });
  return joint;
}

}  // namespace pycollect::dist
