// torch's store as the bootstrap store of a group. Rank 0 opens a numbered rendezvous, which the
// other ranks join, so that no rank reads keys that an earlier group of the same name has left in
// the store, even if that group had other ranks or was aborted.
#pragma once
#include <chrono>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../../group/rendezvous.h"

namespace pycollect::dist {

// Returns how long to pause between two polls of a store, which has been polled for this long.
std::chrono::nanoseconds store_pause(std::chrono::nanoseconds waited);

// Returns the first line of a message, without a place in sources, and the advice that Gloo adds.
std::string first_line(std::string_view text);
// Returns whether this is an error of a store, from C++ or from Python, and what to say of it.
bool is_store_failure(const std::exception& error);
std::string store_failed(const std::exception& e);

class TorchStore final : public ipc::Store {
 public:
  // On ranks other than 0, the first `post` or `read` waits until the deadline for rank 0 to open
  // the rendezvous, and throws Timeout after it.
  TorchStore(c10::intrusive_ptr<c10d::Store> store, int rank, ipc::Deadline deadline)
      : store_(std::move(store)), rank_(rank), deadline_(deadline) {}
  ~TorchStore() override;  // rank 0 closes the rendezvous
  TorchStore(const TorchStore&) = delete;
  TorchStore& operator=(const TorchStore&) = delete;

  void post(const std::string& key, const std::string& value) override;
  std::vector<std::string> read_all(const std::vector<std::string>& keys,
                                    ipc::Deadline deadline) override;
  std::string failure(const std::exception& error) const override {
    return is_store_failure(error) ? store_failed(error) : "";
  }

 private:
  const std::string& prefix();
  // Returns the number of the rendezvous that rank 0 has opened.
  std::string join_rendezvous();
  void wait(const std::vector<std::string>& keys, ipc::Deadline deadline);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const ipc::Deadline deadline_;
  std::string prefix_ = {};  // key prefix of the rendezvous; empty before the first use
};

// The server of a TCPStore, which may be a thread of rank 0's process. It then ends with the last
// reference to the store there, although ranks may have connected to it for their next group.
class StoreServer {
 public:
  // Any store; one of another kind has no such server.
  explicit StoreServer(const c10::intrusive_ptr<c10d::Store>& store);
  // Whether it runs in this process and nothing but one group of torch refers to it.
  bool ends_with_group() const;
  // Waits until it has closed its connection with this process, up to a limit.
  void await_end(std::chrono::milliseconds at_most) const;
  bool exists() const { return port_ != 0; }

 private:
  bool is_connected() const;
  c10::weak_intrusive_ptr<c10d::Store> store_;
  int port_ = 0;  // 0: no server
};

}  // namespace pycollect::dist
