// torch's store as the board on which the processes of a group find each other. What an earlier
// group of the same name has left in the store is not read again, however that one ended and
// whoever was in it: rank 0 opens a numbered meeting, the others come to the one that is open.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../shm/board.h"

namespace pycollect::dist {

class StoreBoard final : public shm::Board {
 public:
  // Whoever is not rank 0 waits until the deadline for it to open the meeting: the first `post` or
  // `read` throws Timeout.
  StoreBoard(c10::intrusive_ptr<c10d::Store> store, int rank, shm::Deadline deadline)
      : store_(std::move(store)), rank_(rank), deadline_(deadline) {}
  ~StoreBoard() override;  // the meeting is over, and rank 0 closes it
  StoreBoard(const StoreBoard&) = delete;
  StoreBoard& operator=(const StoreBoard&) = delete;

  void post(const std::string& key, const std::string& value) override;
  std::string read(const std::string& key, shm::Deadline deadline) override;
  std::vector<std::string> read_all(const std::vector<std::string>& keys,
                                    shm::Deadline deadline) override;

 private:
  const std::string& prefix();
  std::string opened();
  std::string found();
  bool poll(const std::vector<std::string>& keys, shm::Deadline deadline);
  void wait(const std::vector<std::string>& keys, shm::Deadline deadline);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const shm::Deadline deadline_;
  std::string prefix_ = {};  // until it is needed
};

}  // namespace pycollect::dist
