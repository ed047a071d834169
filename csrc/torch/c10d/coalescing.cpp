// See coalescing.h. Coalescing in Backend: a list of calls is one operation between the ranks. They
// agree on all of it before anything runs. A refused list takes the same number of call numbers on
// every rank.
#include "coalescing.h"

#include <algorithm>

#include "../../plan/error.h"
#include "backend.h"

namespace pycollect::dist {
namespace {

// Returns a number of the calling thread that no other thread has had. The system reuses a
// std::thread::id after its thread has ended: the new thread would find a list that the old one had
// left open.
uint64_t this_thread() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t number = threads++;
  return number;
}

}  // namespace

CoalescedList* Coalescing::find() {
  if (threads_ == 0 || closed_) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = lists_.find(this_thread());
  return found == lists_.end() ? nullptr : &found->second;
}

void Coalescing::start() {
  const std::lock_guard lock(mutex_);
  lists_.try_emplace(this_thread());
  threads_ = static_cast<int>(lists_.size());
}

std::optional<CoalescedList> Coalescing::take() {
  const std::lock_guard lock(mutex_);
  const auto found = lists_.find(this_thread());
  if (found == lists_.end()) return std::nullopt;
  std::optional<CoalescedList> list(std::move(found->second));
  lists_.erase(found);
  threads_ = static_cast<int>(lists_.size());
  return list;
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
    auto* const own = dynamic_cast<GroupWork*>(part.get());
    if (own == nullptr) continue;
    if (own->staging()) any = own->staging();
    for (const at::Device d : own->devices())
      if (std::ranges::find(devices, d) == devices.end()) devices.push_back(d);
  }
  auto joint = new_future(devices);
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

// Adds a call to the list and returns null. After a refusal, further calls are not checked.
WorkPtr Backend::coalesce(CoalescedList& list, const CallParams& info,
                          const CollectiveWorkPtr& work, Build build) {
  GroupCall& call = work->call();
  if (!list.first) list.first = info.collective;
  if (list.refusal) return {};
  call.written = &list.written;
  list.refusal = try_build(info, "coalesced ", call, build);
  call.written = nullptr;
  if (list.refusal) return {};
  call.event = ProfilerEvent::begin(info.name, info.inputs);
  list.calls.push_back(work);
  return {};
}

WorkPtr Backend::coalesce(CoalescedList& list, c10::function_ref<P2POp()> op) {
  if (list.refusal) return {};
  try {
    CoalescedList::CoalescedMessage message{op(), {}};
    const at::Tensor& tensor = message.op.tensor;
    DeviceOps& devices = *communicator_->devices();
    if (check_message(message.op, me_.world, devices))
      message.requested_at = devices.record_event(tensor.device());
    list.messages.push_back(std::move(message));
  } catch (const std::exception& error) {
    list.refusal = Refusal{text("coalesced ", error.what()), std::current_exception()};
  }
  return {};
}

// Posts each message after the work that its stream had when the message was listed.
std::vector<WorkPtr> Backend::post(const std::vector<CoalescedList::CoalescedMessage>& list) {
  std::vector<WorkPtr> works;
  if (list.empty()) return works;
  communicator_->require_open("batch_isend_irecv");
  for (const auto& [op, requested_at] : list) {
    if (requested_at) requested_at->block_current(op.tensor.device());
    works.push_back(communicator_->post(op));
  }
  return works;
}

// Does nothing for a list that has only messages: no peer waits for it.
void Backend::publish_refusal(const CoalescedList& list) {
  if (!list.first) return;
  const auto timeout = list.calls.empty() ? kNoTimeout : list.calls.front()->limit();
  publish_refusal(*list.refusal, {*list.first, pycollect::name(*list.first), timeout, false});
}

void Backend::startCoalescing() {
  fork_guard_.require_not_forked("start of coalescing");
  if (coalescing_->find() == nullptr) return coalescing_->start();
  const std::string why = "this thread has already started to coalesce calls of the group";
  abandonCoalescing(why, false);
  throw std::invalid_argument(
      text("start of coalescing: ", why, "; the calls coalesced since then were dropped"));
}

// Messages are posted after the list's collectives have run: they may send the results of these,
// and if the collectives are refused, no peer would receive the messages.
WorkPtr Backend::endCoalescing() {
  fork_guard_.require_not_forked("end of coalescing");
  auto list = coalescing_->take();
  require(list.has_value(),
          "end of coalescing: this thread has not started to coalesce calls of the group");
  if (list->refusal) {
    publish_refusal(*list);
    std::rethrow_exception(list->refusal->error);
  }
  communicator_->push_all(list->calls);
  const std::vector<WorkPtr> collectives(list->calls.begin(), list->calls.end());
  if (!list->messages.empty()) c10::make_intrusive<CoalescedWork>(collectives)->wait();
  std::vector<WorkPtr> works = post(list->messages);
  works.insert(works.end(), collectives.begin(), collectives.end());
  if (works.size() == 1) return works.front();
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

void Backend::abandonCoalescing(std::string_view why, bool unlisted) {
  if (fork_guard_.forked()) return;
  auto list = coalescing_->take();
  if (!list && !unlisted) return;
  if (!list) list.emplace();
  if (unlisted && !list->first) list->first = Collective::all_reduce;
  if (!list->refusal) list->refusal = Refusal{text("coalesced calls: ", why), {}};
  publish_refusal(*list);
}

}  // namespace pycollect::dist
