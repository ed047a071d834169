// Memory that several processes map: a file without a name, so that nothing is left behind however
// a job ends. Address space is reserved whole and memory is committed in parts, so what is mapped
// never moves.
#pragma once
#include <cstddef>
#include <memory>

#include "system.h"

namespace pycollect::shm {

class Segment {
 public:
  static std::shared_ptr<Segment> create(std::size_t bytes);
  static std::shared_ptr<Segment> adopt(Descriptor file, std::size_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return file_.get(); }

  // Gets memory for a part now, or throws std::runtime_error that says how much there was to get:
  // too little is an error here and not a SIGBUS later.
  void commit(std::size_t offset, std::size_t bytes);
  // Maps a committed part's pages into this process, so that no collective pays for the faults.
  // Harmless to who uses them meanwhile.
  void touch(std::size_t offset, std::size_t bytes) const noexcept;
  void give_back(std::size_t offset, std::size_t bytes) noexcept;  // whole pages of it

 private:
  Segment(Descriptor file, std::size_t bytes);
  Descriptor file_;
  std::size_t bytes_;
  std::byte* data_;
};

}  // namespace pycollect::shm
