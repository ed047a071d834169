// See carrier.h. Of a Gloo process group, a wait that runs out of time closes all connections;
// `close` makes use of it, because no other call ends a wait of another thread.
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <string_view>

#include "carrier.h"

namespace pycollect::dist {
namespace {

// Limits of the timeout that is passed to a work: zero stands for the group's, and Gloo adds it to
// a clock of nanoseconds.
constexpr std::chrono::milliseconds kLeastTimeout{1}, kMostTimeout = std::chrono::hours(24 * 365);

class GlooCarrier final : public Carrier {
 public:
  explicit GlooCarrier(TorchBackendPtr group) : group_(std::move(group)) {}

  // One byte from one to the other makes both of them use the connection.
  void connect(Rank peer) override {
    const auto end = group_->getRank() < peer ? TransferEnd::send : TransferEnd::receive;
    begin(end, peer, kConnect, &scratch_, 1, {}).work->wait(kMostTimeout);
  }

  BegunTransfer begin(TransferEnd end, Rank peer, int number, std::byte* at, std::size_t bytes,
                      ipc::Deadline) override {
    const at::DisableRecordFunctionGuard no_event;
    std::vector<at::Tensor> tensors{
        at::from_blob(at, {static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte))};
    return {end == TransferEnd::send ? group_->send(tensors, peer, number)
                                     : group_->recv(tensors, peer, number),
            shared_from_this()};
  }

  bool await(c10d::Work& transfer, ipc::Deadline deadline) override {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - ipc::Clock::now());
    return transfer.wait(std::clamp(left, kLeastTimeout, kMostTimeout));
  }

  void interrupt(c10d::Work& transfer) override { transfer.abort(); }  // its `wait` returns false

  // A receive of a message that never comes runs out of time.
  void close(const std::set<Rank>& peers) override {
    for (const Rank peer : peers) {
      c10::intrusive_ptr<c10d::Work> work;
      try {
        work = begin(TransferEnd::receive, peer, kNever, &scratch_, 1, {}).work;
      } catch (const std::exception&) {
        continue;  // this connection is closed already
      }
      try {
        work->wait(kLeastTimeout);
      } catch (const std::exception& error) {
        if (std::string_view(error.what()).find("Timed out") != std::string_view::npos) return;
      }
    }
  }

 private:
  const TorchBackendPtr group_;
  std::byte scratch_{};
};

}  // namespace

std::shared_ptr<Carrier> gloo_carrier(TorchBackendPtr group) {
  return std::make_shared<GlooCarrier>(std::move(group));
}

}  // namespace pycollect::dist
