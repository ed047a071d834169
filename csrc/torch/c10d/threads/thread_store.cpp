// See thread_store.h.
#include "thread_store.h"

#include "../../../plan/error.h"
#include "../interpreter.h"

namespace pycollect::dist {

using rank_threads::ReadyCondition;

void ThreadStore::notify() {
  const GilRelease gil_release;
  const std::lock_guard lock(scheduler_->mutex());
  scheduler_->notify();
}

namespace {
thread_local ThreadStore::Purpose* purpose = nullptr;  // of the calling thread's waits
}

ThreadStore::Purpose::Purpose(std::string what, ipc::Deadline deadline)
    : what(std::move(what)), deadline(deadline) {
  purpose = this;
}
ThreadStore::Purpose::~Purpose() { purpose = nullptr; }

// A user's store may fail. The error is thrown to the caller that waits, not to the thread that
// checks the condition for it.
ReadyCondition ThreadStore::written(const Keys& keys) const {
  const auto is_written = [this, keys] {
    try {
      return keys_->check(keys);
    } catch (const std::exception&) {
      return true;  // the caller's next use of the store throws it
    }
  };
  if (purpose != nullptr) return {is_written, [what = purpose->what] { return what; }};
  ReadyCondition condition{
      is_written,
      [keys] { return text("the store's key '", keys.empty() ? "" : keys.front(), "'"); }};
  condition.is_open = true;
  return condition;
}

void ThreadStore::set(const std::string& key, const Value& value) {
  keys_->set(key, value);
  notify();
}

ThreadStore::Value ThreadStore::compareSet(const std::string& key, const Value& expected,
                                           const Value& desired) {
  Value found = keys_->compareSet(key, expected, desired);
  notify();
  return found;
}

// A caller that reads a key again and again waits for another value, so other ranks run first.
ThreadStore::Value ThreadStore::get(const std::string& key) {
  wait({key});
  if (purpose == nullptr) {
    const GilRelease gil_release;
    do {
      scheduler_->let_others_run(scheduler_->rank_of_thread());
      wait({key});  // another rank may have deleted it
    } while (!keys_->check({key}));
    return keys_->get(key);
  }
  const auto before = purpose->read.find(key);
  if (before != purpose->read.end()) await_change(key, before->second);
  return purpose->read[key] = keys_->get(key);
}

void ThreadStore::await_change(const std::string& key, const Value& value) {
  const GilRelease gil_release;
  const auto changed = [&] {
    try {
      return keys_->get(key) != value;
    } catch (const std::exception&) {
      return true;  // the caller's next use of the store throws it
    }
  };
  scheduler_->wait(scheduler_->rank_of_thread(),
                   {changed, [what = purpose->what] { return what; }, purpose->deadline});
}

int64_t ThreadStore::add(const std::string& key, int64_t value) {
  const int64_t sum = keys_->add(key, value);
  notify();
  return sum;
}

// A caller that checks repeatedly waits for another rank.
bool ThreadStore::check(const Keys& keys) {
  const GilRelease gil_release;
  if (keys_->check(keys)) return true;
  return scheduler_->yield_until(scheduler_->rank_of_thread(), written(keys));
}

void ThreadStore::wait(const Keys& keys, const std::chrono::milliseconds& timeout) {
  const GilRelease gil_release;
  ReadyCondition condition = written(keys);
  condition.deadline = ipc::deadline_after(timeout);
  condition.is_limited = purpose == nullptr && timeout != getTimeout();
  if (!scheduler_->wait(scheduler_->rank_of_thread(), condition))
    throw Timeout(text("no rank has written ", condition.describe(), " before the timeout was over",
                       scheduler_->describe_ranks()));
  keys_->check(keys);  // throws the store's error, if it has failed
}

void ThreadStore::append(const std::string& key, const Value& value) {
  keys_->append(key, value);
  notify();
}

std::vector<ThreadStore::Value> ThreadStore::multiGet(const Keys& keys) {
  wait(keys);
  return keys_->multiGet(keys);
}

void ThreadStore::multiSet(const Keys& keys, const std::vector<Value>& values) {
  keys_->multiSet(keys, values);
  notify();
}

}  // namespace pycollect::dist
