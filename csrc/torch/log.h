// Log lines and warnings of the C++ code; pycollect/log.py prints them.
#pragma once
#include <string>

namespace pycollect {

using LineSink = void (*)(const std::string& line);

// Sets the function that prints log lines (PYCOLLECT_LOG), once, at import. Without it there is no
// log.
void set_log_sink(LineSink sink);
bool is_logging();

// Logs a line the first time, and drops every repetition.
void log_once(const std::string& line);

// Warns the user, even without a log. The function that prints warnings is set once, at import.
void set_warning_sink(LineSink sink);
void warn(const std::string& line);

}  // namespace pycollect
