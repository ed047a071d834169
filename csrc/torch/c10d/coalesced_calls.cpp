// What the backend makes of coalescing.h's lists. All that a list asks the group for is one to the
// other ranks: they agree on all of it before anything runs, and a list that is refused takes no
// more and no fewer of the group's calls on one rank than on another.
#include "../../plan/error.h"
#include "backend.h"
#include "runner.h"

namespace pycollect::dist {

// Returns no work. Behind a refusal nothing is looked at any more.
WorkPtr Backend::coalesce(CoalescedList& list, const Ask& ask,
                          c10::function_ref<void(Call&)> build) {
  if (!list.first) list.first = ask.collective;
  if (list.refusal) return {};
  Call call = new_call(ask);
  list.refusal = attempt(ask, "coalesced ", call, build);
  if (list.refusal) return {};
  call.number = calls_++;
  list.calls.push_back(std::move(call));
  return {};
}

// Nobody waits for a list of messages alone.
void Backend::tell(const CoalescedList& list) {
  if (!list.first) return;
  Call call = new_call({*list.first, pycollect::name(*list.first), kNoTimeout, false});
  if (!list.calls.empty()) call.timeout = list.calls.front().timeout;
  tell(*list.refusal, std::move(call));
}

void Backend::startCoalescing() {
  if (coalescing_.find() == nullptr) return coalescing_.start();
  const std::string why = "this thread has begun to coalesce calls of the group, and not ended it";
  abandonCoalescing(why, false);
  throw std::invalid_argument(
      text("start of coalescing: ", why, "; what it has asked for since did not run"));
}

WorkPtr Backend::endCoalescing() {
  auto list = coalescing_.take();
  require(list.has_value(),
          "end of coalescing: this thread has begun to coalesce no calls of the group");
  std::vector<WorkPtr> works;
  try {
    if (list->refusal) std::rethrow_exception(list->refusal->error);
    for (const auto& message : list->messages) works.push_back(post(message));
  } catch (const std::exception& error) {
    if (!list->refusal) list->refusal = Refusal{text("coalesced ", error.what()), {}};
    tell(*list);
    throw;
  }
  for (auto& work : queue_->push_all(bind_together(std::move(list->calls))))
    works.push_back(std::move(work));
  if (works.size() == 1) return works.front();
  return c10::make_intrusive<JointWork>(std::move(works));
}

void Backend::abandonCoalescing(std::string_view why, bool asked) {
  auto list = coalescing_.take();
  if (!list && !asked) return;
  if (!list) list.emplace();
  if (asked && !list->first) list->first = Collective::all_reduce;
  if (!list->refusal) list->refusal = Refusal{text("coalesced calls: ", why), {}};
  tell(*list);
}

}  // namespace pycollect::dist
