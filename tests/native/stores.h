// Rendezvous stores for tests: a map for threads as ranks, a folder for processes as ranks.
#pragma once
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "../../csrc/bootstrap/store.h"
#include "../../csrc/plan/error.h"

namespace pycollect::ipc {

class MapStore final : public Store {
 public:
  void post(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    posted_.notify_all();
  }
  std::string read(const std::string& key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    // The system clock: ThreadSanitizer of g++ 12 does not support waits on the steady clock.
    const auto until = std::chrono::system_clock::now() + (deadline - Clock::now());
    if (!posted_.wait_until(lock, until, [&] { return values_.contains(key); }))
      throw Timeout(text("no value was posted for ", key));
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable posted_;
  std::map<std::string, std::string> values_;
};

// A key is a file, which gets its final name only once it is complete.
class FileStore final : public Store {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
  }
  void post(const std::string& key, const std::string& value) override {
    const std::filesystem::path file = path(key);
    std::ofstream(file.string() + ".part") << value;
    std::filesystem::rename(file.string() + ".part", file);
  }
  std::string read(const std::string& key, Deadline deadline) override {
    for (;;) {
      if (std::ifstream file(path(key)); file) return (std::ostringstream() << file.rdbuf()).str();
      if (Clock::now() >= deadline) throw Timeout(text("no value was posted for ", key));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

 private:
  std::filesystem::path path(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '_';
    return folder_ / key;
  }
  std::filesystem::path folder_;
};

}  // namespace pycollect::ipc
