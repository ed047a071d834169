// A store for ranks that are threads: waiting for a key lets other ranks run.
#pragma once
#include <map>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../../rank_threads/scheduler.h"

namespace pycollect::dist {

// Keeps its keys in another store of this process.
class ThreadStore final : public c10d::Store {
 public:
  using Keys = std::vector<std::string>;
  using Value = std::vector<uint8_t>;
  ThreadStore(std::shared_ptr<rank_threads::RankScheduler> scheduler,
              c10::intrusive_ptr<c10d::Store> keys)
      : scheduler_(std::move(scheduler)), keys_(std::move(keys)) {}

  // Names what the calling thread waits for in stores, as long as the object exists. The thread
  // waits until the deadline for another value, if it reads a key again.
  struct Purpose {
    Purpose(std::string what, ipc::Deadline deadline);
    ~Purpose();
    Purpose(const Purpose&) = delete;
    Purpose& operator=(const Purpose&) = delete;

    const std::string what;
    const ipc::Deadline deadline;
    std::map<std::string, Value> read = {};
  };

  // Virtual in newer versions of torch.
  virtual c10::intrusive_ptr<c10d::Store> clone() {
    return c10::make_intrusive<ThreadStore>(scheduler_, keys_);
  }
  void set(const std::string& key, const Value& value) override;
  Value compareSet(const std::string& key, const Value& expected, const Value& desired) override;
  Value get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override { return keys_->deleteKey(key); }
  bool check(const Keys& keys) override;
  int64_t getNumKeys() override { return keys_->getNumKeys(); }
  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const Value& value) override;
  std::vector<Value> multiGet(const Keys& keys) override;
  void multiSet(const Keys& keys, const std::vector<Value>& values) override;
  bool hasExtendedApi() const override { return keys_->hasExtendedApi(); }

 private:
  void notify();
  void await_change(const std::string& key, const Value& value);
  rank_threads::ReadyCondition written(const Keys& keys) const;

  const std::shared_ptr<rank_threads::RankScheduler> scheduler_;
  const c10::intrusive_ptr<c10d::Store> keys_;
};

}  // namespace pycollect::dist
