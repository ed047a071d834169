// What the backend makes of coalescing.h's lists. All that a list asks the group for is one to the
// other ranks: they agree on all of it before anything runs, and a list that is refused takes no
// more and no fewer of the group's calls on one rank than on another.
#include "../../plan/error.h"
#include "backend.h"
#include "runner.h"

namespace pycollect::dist {

// These return no work. Behind a refusal nothing is looked at any more.
WorkPtr Backend::coalesce(CoalescedList& list, const Ask& ask, Call call, const at::Tensor* first,
                          Build build) {
  if (!list.first) list.first = ask.collective;
  if (list.refusal) return {};
  try {
    call.passage = begin(call, first);
  } catch (...) {  // on all ranks: nobody has to be told
    list.refusal = Refusal{{}, std::current_exception()};
    return {};
  }
  call.written = &list.written;
  list.refusal = attempt(ask, "coalesced ", call, build);
  call.written = nullptr;
  if (!list.refusal) list.calls.push_back(std::move(call));
  return {};
}

WorkPtr Backend::coalesce(CoalescedList& list, const Messages& messages, const char* name,
                          bool receives, c10::function_ref<Messages::Letter()> letter) {
  if (list.refusal) return {};
  try {
    CoalescedList::Message message{letter(), receives, {}};
    const at::Tensor& tensor = message.letter.tensor;
    if (messages.check(message.letter, name, receives))
      message.asked = ladder_->devices()->mark(tensor.device());
    list.messages.push_back(std::move(message));
  } catch (const std::exception& error) {
    list.refusal = Refusal{text("coalesced ", error.what()), std::current_exception()};
  }
  return {};
}

// As if each were posted where it was asked for.
std::vector<WorkPtr> Backend::post(const std::vector<CoalescedList::Message>& list) {
  std::vector<WorkPtr> works;
  if (list.empty()) return works;
  const auto messages = this->messages("batch_isend_irecv");
  for (const auto& [letter, receives, asked] : list) {
    if (asked) asked->hold_current(letter.tensor.device());
    works.push_back(receives ? messages->receive(letter) : messages->send(letter));
  }
  return works;
}

// Nobody waits for a list of messages alone.
void Backend::tell(const CoalescedList& list) {
  if (!list.first) return;
  Call call = new_call({*list.first, pycollect::name(*list.first), kNoTimeout, false});
  if (!list.calls.empty()) call.timeout = list.calls.front().timeout;
  tell(*list.refusal, std::move(call));
}

void Backend::startCoalescing() {
  forks_.require_none("start of coalescing");
  if (coalescing_->find() == nullptr) return coalescing_->start();
  const std::string why = "this thread has begun to coalesce calls of the group, and not ended it";
  abandonCoalescing(why, false);
  throw std::invalid_argument(
      text("start of coalescing: ", why, "; what it has asked for since did not run"));
}

// Messages come after the collectives beside them, whose results they may be, and which may not
// run: nobody would take a message then.
WorkPtr Backend::endCoalescing() {
  forks_.require_none("end of coalescing");
  auto list = coalescing_->take();
  require(list.has_value(),
          "end of coalescing: this thread has begun to coalesce no calls of the group");
  if (list->refusal) {
    tell(*list);
    std::rethrow_exception(list->refusal->error);
  }
  const auto calls = queue_->push_all(bind_together(std::move(list->calls)));
  const std::vector<WorkPtr> collectives(calls.begin(), calls.end());
  if (!list->messages.empty()) c10::make_intrusive<JointWork>(collectives)->wait();
  std::vector<WorkPtr> works = post(list->messages);
  works.insert(works.end(), collectives.begin(), collectives.end());
  if (works.size() == 1) return works.front();
  return c10::make_intrusive<JointWork>(std::move(works));
}

void Backend::abandonCoalescing(std::string_view why, bool asked) {
  if (!forks_.none()) return;
  auto list = coalescing_->take();
  if (!list && !asked) return;
  if (!list) list.emplace();
  if (asked && !list->first) list->first = Collective::all_reduce;
  if (!list->refusal) list->refusal = Refusal{text("coalesced calls: ", why), {}};
  tell(*list);
}

}  // namespace pycollect::dist
