// Coalescing in Backend. A list of calls is one operation between the ranks: they agree on all of
// it before anything runs. A refused list takes the same number of call numbers on every rank.
#include "../../plan/error.h"
#include "backend.h"

namespace pycollect::dist {

// Adds a call to the list and returns null. After a refusal, further calls are not checked.
WorkPtr Backend::coalesce(CoalescedList& list, const CallParams& info, Call call,
                          const at::Tensor* first, Build build) {
  if (!list.first) list.first = info.collective;
  if (list.refusal) return {};
  try {
    call.staging = begin(call, first);
  } catch (...) {  // begin() fails on all ranks alike, so nothing is published
    list.refusal = Refusal{{}, std::current_exception()};
    return {};
  }
  call.written = &list.written;
  list.refusal = try_build(info, "coalesced ", call, build);
  call.written = nullptr;
  if (list.refusal) return {};
  call.event = ProfilerEvent::begin(info.name, info.inputs);
  list.calls.push_back(std::move(call));
  return {};
}

WorkPtr Backend::coalesce(CoalescedList& list, const PointToPoint& messages, const char* name,
                          bool receives, c10::function_ref<P2POp()> op) {
  if (list.refusal) return {};
  try {
    CoalescedList::CoalescedMessage message{op(), receives, {}};
    const at::Tensor& tensor = message.op.tensor;
    if (messages.check(message.op, name, receives))
      message.requested_at = connection_->devices()->record_event(tensor.device());
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
  const auto messages = this->messages("batch_isend_irecv");
  for (const auto& [op, receives, requested_at] : list) {
    if (requested_at) requested_at->block_current(op.tensor.device());
    works.push_back(receives ? messages->receive(op) : messages->send(op));
  }
  return works;
}

// Does nothing for a list that has only messages: no peer waits for it.
void Backend::publish_refusal(const CoalescedList& list) {
  if (!list.first) return;
  Call call = new_call({*list.first, pycollect::name(*list.first), kNoTimeout, false});
  if (!list.calls.empty()) call.timeout = list.calls.front().timeout;
  publish_refusal(*list.refusal, std::move(call));
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
  const auto calls = connection_->queue().push_all(std::move(list->calls));
  const std::vector<WorkPtr> collectives(calls.begin(), calls.end());
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
