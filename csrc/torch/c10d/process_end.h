// Threads of Python's that wait in here while the interpreter ends. They wake with an error, and
// would take the interpreter's lock to raise it; up to Python 3.13 that ends such a thread by
// unwinding its stack, which C++ answers by ending the process with SIGABRT. So they stay asleep,
// as Python 3.14 has it.
#pragma once

namespace pycollect::dist {

// From now on only the calling thread and the groups' own go back to the interpreter.
void begin_process_end();
// By a thread of a group's own: the end of the group waits for it.
void exempt_from_process_end();

// The first local of what Python calls and what may wait, so that it holds nothing when it stays.
class StaysAtProcessEnd {
 public:
  StaysAtProcessEnd() = default;
  ~StaysAtProcessEnd();
  StaysAtProcessEnd(const StaysAtProcessEnd&) = delete;
  StaysAtProcessEnd& operator=(const StaysAtProcessEnd&) = delete;
};

}  // namespace pycollect::dist
