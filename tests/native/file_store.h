// A rendezvous store for tests and benchmarks: a folder, in which a key is a file that gets its
// final name only once it is complete. It may falsify values, for fault injection.
#pragma once
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "../../csrc/group/rendezvous.h"
#include "../../csrc/plan/error.h"

namespace pycollect::ipc {

using Falsify = std::function<std::string(const std::string& key, const std::string& value)>;

class FileStore final : public Store {
 public:
  Falsify on_post, on_read;
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
  }
  void post(const std::string& key, const std::string& value) override {
    const std::filesystem::path file = path(key);
    std::ofstream(file.string() + ".part") << (on_post ? on_post(key, value) : value);
    std::filesystem::rename(file.string() + ".part", file);
  }
  std::vector<std::string> read_all(const std::vector<std::string>& keys,
                                    Deadline deadline) override {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(read_one(key, deadline));
    return values;
  }

 private:
  std::string read_one(const std::string& key, Deadline deadline) const {
    for (;;) {
      if (std::ifstream file(path(key)); file) {
        const std::string value = (std::ostringstream() << file.rdbuf()).str();
        return on_read ? on_read(key, value) : value;
      }
      if (Clock::now() >= deadline) throw Timeout(text("no value was posted for ", key));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  std::filesystem::path path(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '_';
    return folder_ / key;
  }
  std::filesystem::path folder_;
};

}  // namespace pycollect::ipc
