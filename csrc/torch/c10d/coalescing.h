// What threads have asked a group for since they called startCoalescing: a list for each thread,
// because what one begins and ends is nothing to another. Nothing in a list has moved yet, and
// nothing is thrown inside: a refusal stands in the list until its end. No queue, no mailbox.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "messages.h"

namespace pycollect::dist {

// Why a call will not run.
struct Refusal {
  std::string told;          // to the other ranks; empty: they find out by themselves
  std::exception_ptr error;  // that this rank raises
};

struct CoalescedList {
  struct Message {
    Messages::Letter letter;
    bool receives;
    std::shared_ptr<Mark> asked;  // where it was, on the tensor's device; null: on the host
  };
  std::vector<Call> calls = {};
  std::vector<Message> messages = {};
  Ranges written = {};                   // by the calls
  std::optional<Collective> first = {};  // collective that was asked for; none: messages at most
  std::optional<Refusal> refusal = {};   // the first; nothing of the list will run
};

// Has all ranks agree on all of them before the first one runs.
std::vector<Call> bind_together(std::vector<Call> calls);

class Coalescing {
 public:
  // The calling thread's list, which no other thread touches; null: it has none.
  CoalescedList* find();
  void start();
  // Ends it; none: there was none.
  std::optional<CoalescedList> take();
  // The group has been aborted: nothing more is put in any list, but is told so where it is asked.
  void close() { closed_ = true; }

 private:
  std::mutex mutex_;
  std::atomic<int> threads_{0};  // that have a list: most calls look no further
  std::atomic<bool> closed_{false};
  std::map<uint64_t, CoalescedList> lists_;
};

}  // namespace pycollect::dist
