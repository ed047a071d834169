// torch's store as the board on which the processes of a group find each other. What an earlier
// group of the same name has left in the store is not read again.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../shm/board.h"

namespace pycollect::dist {

class StoreBoard final : public shm::Board {
 public:
  StoreBoard(c10::intrusive_ptr<c10d::Store> store, int rank)
      : store_(std::move(store)), rank_(rank) {}

  void post(const std::string& key, const std::string& value) override;
  std::string read(const std::string& key, shm::Deadline deadline) override;
  std::vector<std::string> read_all(const std::vector<std::string>& keys,
                                    shm::Deadline deadline) override;

 private:
  const std::string& prefix();
  void wait(const std::vector<std::string>& keys, shm::Deadline deadline);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  std::string prefix_ = {};  // until it is needed
};

}  // namespace pycollect::dist
