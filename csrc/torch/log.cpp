#include "log.h"

#include <mutex>
#include <set>

namespace pycollect {
namespace {

LineSink log_sink_ = nullptr, warning_sink_ = nullptr;  // set once, at import

}  // namespace

void set_log_sink(LineSink sink) { log_sink_ = sink; }
bool is_logging() { return log_sink_ != nullptr; }

void log_once(const std::string& line) {
  if (!is_logging()) return;
  static std::mutex mutex;
  static std::set<std::string> logged;
  {
    const std::lock_guard lock(mutex);
    if (!logged.insert(line).second) return;
  }
  log_sink_(line);
}

void set_warning_sink(LineSink sink) { warning_sink_ = sink; }
void warn(const std::string& line) {
  if (warning_sink_ != nullptr) warning_sink_(line);
}

}  // namespace pycollect
