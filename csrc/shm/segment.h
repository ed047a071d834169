// Memory that several processes map: a file without a name, or one whose name is gone as soon as
// all have opened it, so that nothing is left behind however a job ends. Address space is reserved
// whole and memory is committed in parts, so what is mapped never moves.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

namespace pycollect::shm {

class Segment {
 public:
  static std::shared_ptr<Segment> create_unnamed(std::size_t bytes);
  static std::shared_ptr<Segment> create_named(const std::string& name, std::size_t bytes);
  static std::shared_ptr<Segment> open_named(const std::string& name, std::size_t bytes);
  static std::shared_ptr<Segment> adopt(int fd, std::size_t bytes);  // takes the descriptor
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return fd_; }

  // Gets memory for a part now, or throws std::runtime_error that says how much there was to get:
  // a full /dev/shm is an error here and not a SIGBUS later.
  void commit(std::size_t offset, std::size_t bytes);
  // Maps a committed part's pages into this process, so that no collective pays for the faults.
  void touch(std::size_t offset, std::size_t bytes) const;
  void give_back(std::size_t offset, std::size_t bytes);  // whole pages of it

 private:
  Segment(int fd, std::size_t bytes);
  int fd_;
  std::size_t bytes_;
  std::byte* data_;
};

}  // namespace pycollect::shm
