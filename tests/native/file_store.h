// A rendezvous store for tests: a folder, in which a key is a file that gets its final name only
// once it is complete.
#pragma once
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "../../csrc/bootstrap/store.h"
#include "../../csrc/plan/error.h"

namespace pycollect::ipc {

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
