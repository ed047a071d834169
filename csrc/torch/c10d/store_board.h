// torch's store as the board on which the processes of a group find each other.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../shm/board.h"

namespace pycollect::dist {

class StoreBoard final : public shm::Board {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void post(const std::string& key, const std::string& value) override;
  std::string read(const std::string& key, shm::Deadline deadline) override;
  std::vector<std::string> read_all(const std::vector<std::string>& keys,
                                    shm::Deadline deadline) override;

 private:
  void wait(const std::vector<std::string>& keys, shm::Deadline deadline);

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace pycollect::dist
