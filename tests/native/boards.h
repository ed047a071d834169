// Boards for tests: a map for ranks that are threads, a folder for ranks that are processes.
#pragma once
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "../../csrc/plan/error.h"
#include "../../csrc/shm/board.h"

namespace pycollect::shm {

class MapBoard final : public Board {
 public:
  void post(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    posted_.notify_all();
  }
  std::string read(const std::string& key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    // The system's clock: ThreadSanitizer of g++ 12 does not know how one waits by the steady one.
    const auto until = std::chrono::system_clock::now() + (deadline - Clock::now());
    if (!posted_.wait_until(lock, until, [&] { return values_.contains(key); }))
      throw Timeout(text("nobody posted ", key));
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable posted_;
  std::map<std::string, std::string> values_;
};

// A key is a file, complete when it has its name.
class FolderBoard final : public Board {
 public:
  explicit FolderBoard(std::filesystem::path folder) : folder_(std::move(folder)) {
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
      if (Clock::now() >= deadline) throw Timeout(text("nobody posted ", key));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

 private:
  std::filesystem::path path(std::string key) const {
    for (char& letter : key)
      if (letter == '/') letter = '_';
    return folder_ / key;
  }
  std::filesystem::path folder_;
};

}  // namespace pycollect::shm
