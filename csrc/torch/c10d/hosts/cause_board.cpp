// See cause_board.h.
#include "cause_board.h"

#include <chrono>
#include <future>
#include <sstream>
#include <thread>

#include "../../../group/system.h"
#include "../../../plan/error.h"
#include "../torch_store.h"

namespace pycollect::dist {
namespace {

// Time limit of an access: a fourth of the time within which all ranks must notice a death.
constexpr std::chrono::milliseconds kLimit{500};
constexpr char kKey[] = "cause";

// Runs `access` in a thread, which is abandoned if it takes too long. Returns nothing then, after
// an error, and if the store is gone.
template <class T, class F>
std::optional<T> within_limit(const c10::intrusive_ptr<c10d::Store>& store, F access) {
  std::promise<std::optional<T>> promise;
  auto result = promise.get_future();
  try {
    ipc::new_thread([store, access = std::move(access), promise = std::move(promise)]() mutable {
      try {
        promise.set_value(answers(store, kLimit) ? access(*store) : std::nullopt);
      } catch (const std::exception&) {
        promise.set_value(std::nullopt);
      }
    }).detach();
  } catch (const std::exception&) {
    return std::nullopt;
  }
  if (result.wait_for(kLimit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace

void CauseBoard::publish(const ipc::AbortCause& cause) const {
  within_limit<bool>(store_, [cause](c10d::Store& store) -> std::optional<bool> {
    if (store.check({kKey})) return false;
    const std::string text = pycollect::text(cause.kind, " ", cause.first_call, " ", cause.text);
    store.set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
    return true;
  });
}

std::optional<ipc::AbortCause> CauseBoard::find() const {
  return within_limit<ipc::AbortCause>(store_, [](c10d::Store& store) {
    if (!store.check({kKey})) return std::optional<ipc::AbortCause>();
    const std::vector<uint8_t> value = store.get(kKey);
    std::istringstream text(std::string(value.begin(), value.end()));
    ipc::AbortCause cause;
    text >> cause.kind >> cause.first_call;
    std::getline(text.ignore(), cause.text, '\0');
    return std::optional(std::move(cause));
  });
}

}  // namespace pycollect::dist
