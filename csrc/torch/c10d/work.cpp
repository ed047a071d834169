// See work.h. A work that has run in its caller's thread has no queue and no lock.
#include "work.h"

#include "../../plan/error.h"
#include "queue.h"
#include "under_way.h"

namespace pycollect::dist {

namespace {

c10::intrusive_ptr<Future> new_future_on(std::vector<at::Device> devices) {
  std::erase_if(devices, [](at::Device d) { return d.is_cpu(); });  // torch's have no streams
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                     std::move(devices));
}

}  // namespace

c10::intrusive_ptr<Future> new_future(const Passage* passage) {
  return new_future_on(passage == nullptr ? std::vector<at::Device>() : passage->on());
}

void complete(Future& future, const Tensors& results, std::exception_ptr error,
              const Passage* passage) {
  const auto mark = [&] { future.markCompleted(c10::IValue(results)); };
  if (error)
    future.setErrorIfNeeded(std::move(error));
  else if (passage == nullptr)
    mark();
  else
    passage->devices().complete(passage->on(), mark);
}

void throw_unfinished(const std::string& operation, std::chrono::milliseconds timeout) {
  throw Timeout(text(operation, " has not finished within ",
                     std::chrono::duration<double>(timeout).count(), " seconds"));
}

std::string QueuedWork::described() const {
  std::string said = text(name(), " #", call_.number);
  const char* before = ", which rank ";
  const std::vector<Rank> missing = queue_->missing();
  for (Rank r : missing) said += text(std::exchange(before, " and "), r);
  return missing.empty() ? said : said + (missing.size() == 1 ? " has" : " have") + " not begun,";
}

bool QueuedWork::isCompleted() {
  return is_done() && (error_ || !call_.passage || call_.passage->landed());
}

bool QueuedWork::isSuccess() const { return is_done() && exception() == nullptr; }

// `error_` is written once, before `done_`.
std::exception_ptr QueuedWork::exception() const {
  if (!is_done() || error_) return is_done() ? error_ : nullptr;
  return call_.passage ? call_.passage->failure() : nullptr;
}

bool QueuedWork::wait(std::chrono::milliseconds timeout) {
  const UnderWay under_way;
  if (call_.passage) check_no_capture(*call_.passage, name());
  if (!is_done()) {
    if (!is_limit(timeout))
      queue_->wait(*this);
    else if (!queue_->wait_until(*this, shm::deadline_after(timeout)))
      throw_unfinished(described(), timeout);
  }
  if (const auto error = exception()) std::rethrow_exception(error);
  if (call_.passage) call_.passage->join();
  return true;
}

void QueuedWork::abort() {
  if (!is_done()) queue_->abort(text(name(), " was aborted"));
}

c10::intrusive_ptr<Future> QueuedWork::getFuture() {
  if (queue_ == nullptr) {
    auto future = new_future(passage());
    complete(*future, call_.results, nullptr, passage());
    return future;
  }
  bool first = false;
  {
    const std::lock_guard lock(queue_->mutex());
    first = future_ == nullptr;
    if (first) future_ = new_future(passage());
    first = first && is_done();
  }
  if (first) complete(*future_, call_.results, error_, passage());
  return future_;
}

void QueuedWork::let_go() {
  call_.requests.clear();
  call_.held.clear();
  call_.fills.clear();
  call_.copies.clear();
  if (call_.passage) call_.passage->let_go();
}

c10::intrusive_ptr<Future> QueuedWork::finish(std::exception_ptr error) {
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
  return future_;
}

bool JointWork::isCompleted() {
  for (const auto& part : parts_)
    if (!part->isCompleted()) return false;
  return true;
}

bool JointWork::isSuccess() const {
  for (const auto& part : parts_)
    if (!part->isSuccess()) return false;
  return true;
}

std::exception_ptr JointWork::exception() const {
  for (const auto& part : parts_)
    if (auto error = part->exception()) return error;
  return nullptr;
}

Tensors JointWork::result() {
  Tensors all;
  for (const auto& part : parts_)
    for (at::Tensor& t : part->result()) all.push_back(std::move(t));
  return all;
}

// All of them, also when one has failed: their memory is the caller's again afterwards.
bool JointWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = shm::deadline_after(timeout);
  std::exception_ptr error;
  for (const auto& part : parts_) {
    auto left = timeout;
    if (is_limit(timeout))
      left = std::max(
          std::chrono::milliseconds(1),
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - shm::Clock::now()));
    try {
      part->wait(left);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  return true;
}

void JointWork::abort() {
  for (const auto& part : parts_) part->abort();
}

// The parts' results are on several streams of the group's: what is marked comes after all of them
// on those of the last.
c10::intrusive_ptr<Future> JointWork::getFuture() {
  c10::List<c10::intrusive_ptr<Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  std::vector<at::Device> devices;
  const Passage* any = nullptr;
  for (const auto& part : parts_) {
    futures.push_back(part->getFuture());
    if (const auto* own = dynamic_cast<const OwnWork*>(part.get()); own && own->passage()) {
      any = own->passage();
      devices.insert(devices.end(), any->on().begin(), any->on().end());
    }
  }
  auto joint = new_future_on(devices);
  const auto self = c10::intrusive_ptr<JointWork>::unsafe_reclaim_from_nonowning(this);
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
