// Log lines and warnings of the C++ code; pycollect/log.py prints them.
#pragma once
#include <mutex>
#include <set>
#include <string>

namespace pycollect {

using LineSink = void (*)(const std::string& line);

// The functions that print log lines (PYCOLLECT_LOG) and warnings. They are set once, at import;
// null: there is no log.
inline LineSink log_sink = nullptr, warning_sink = nullptr;

inline bool is_logging() { return log_sink != nullptr; }

// Logs a line the first time, and drops every repetition.
inline void log_once(const std::string& line) {
  if (!is_logging()) return;
  static std::mutex mutex;
  static std::set<std::string> logged;
  {
    const std::lock_guard lock(mutex);
    if (!logged.insert(line).second) return;
  }
  log_sink(line);
}

// Warns the user, even without a log.
inline void warn(const std::string& line) {
  if (warning_sink != nullptr) warning_sink(line);
}

}  // namespace pycollect
