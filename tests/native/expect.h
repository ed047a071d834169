// What a native test expects: a failure prints its place and ends the process.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <source_location>
#include <string>
#include <utility>

namespace pycollect {

inline void expect(bool ok, const std::string& why,
                   std::source_location at = std::source_location::current()) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s:%u: %s\n", at.file_name(), at.line(), why.c_str());
  std::_Exit(1);
}
inline void expect_equal(const std::string& got, const std::string& wanted,
                         std::source_location at = std::source_location::current()) {
  expect(got == wanted, "got    " + got + "\n        wanted " + wanted, at);
}
inline bool contains(const std::string& whole, const std::string& part) {
  return whole.find(part) != std::string::npos;
}
inline void expect_part(const std::string& whole, const std::string& part,
                        std::source_location at = std::source_location::current()) {
  expect(contains(whole, part), "got    " + whole + "\n        without " + part, at);
}

using Tests = std::initializer_list<std::pair<const char*, std::function<void()>>>;
inline void run_tests(Tests tests) {
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::puts("all good");
}

// ThreadSanitizer sees one process, and its runs set NO_FORK: ranks are then threads only.
inline bool forks() { return std::getenv("NO_FORK") == nullptr; }

}  // namespace pycollect
