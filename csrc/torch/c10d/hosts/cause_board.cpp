// See cause_board.h.
#include "cause_board.h"

#include <chrono>
#include <future>
#include <thread>

#include "../../../group/new_thread.h"

namespace pycollect::dist {
namespace {

// Time limit of an access: a fourth of the time within which all ranks must notice a death.
constexpr std::chrono::milliseconds kLimit{500};
constexpr char kKey[] = "cause";

// Runs `access` in a thread, which is abandoned if it takes too long. Returns nothing then, and
// after an error.
template <class T, class F>
std::optional<T> within_limit(F access) {
  std::promise<std::optional<T>> promise;
  auto result = promise.get_future();
  try {
    ipc::new_thread([access = std::move(access), promise = std::move(promise)]() mutable {
      try {
        promise.set_value(access());
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
  within_limit<bool>([store = store_, cause]() -> std::optional<bool> {
    if (store->check({kKey})) return false;
    const std::string text = std::to_string(cause.kind) + " " + cause.text;
    store->set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
    return true;
  });
}

std::optional<ipc::AbortCause> CauseBoard::find() const {
  return within_limit<ipc::AbortCause>([store = store_]() -> std::optional<ipc::AbortCause> {
    if (!store->check({kKey})) return std::nullopt;
    const std::vector<uint8_t> value = store->get(kKey);
    const std::string text(value.begin(), value.end());
    const std::size_t space = text.find(' ');
    return ipc::AbortCause{static_cast<uint32_t>(std::stoul(text.substr(0, space))),
                           text.substr(space + 1)};
  });
}

}  // namespace pycollect::dist
