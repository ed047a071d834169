// One send or receive.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <memory>

#include "../group/group.h"
#include "../group/segment.h"

namespace pycollect::ipc {

struct Envelope {  // a send and its receive must agree on all three
  uint64_t bytes;
  uint8_t dtype;  // index in kAllDTypeNames
  uint32_t tag;
};

inline constexpr Rank kAnySource = -1;  // wildcard source of a receive, like MPI_ANY_SOURCE

class Transfer {
 public:
  // `buffer`: where the data is, or where it goes; it must stay valid until the transfer is done.
  // `owner`, if given, keeps it; then the data of a large message to another host goes directly,
  // and the buffer may be used for a while after the transfer has failed.
  Transfer(Rank peer, const Envelope& what, std::byte* buffer, bool receives,
           MemoryOwner owner = {})
      : envelope(what),
        receives(receives),
        owner_(std::move(owner)),
        buffer_(buffer),
        peer_(peer) {}

  // The accessors of a transfer's state may be called from any thread.
  bool done() const { return done_.load(std::memory_order_seq_cst); }  // complete or failed
  void rethrow() const {  // throws the transfer's error if it failed
    if (done() && error_) std::rethrow_exception(error_);
  }
  // For a wildcard receive: kAnySource until a message has been matched, then the message's sender.
  Rank peer() const { return peer_.load(std::memory_order_relaxed); }

  const Envelope envelope;
  const bool receives;
  // Of a send: whether its data is in the buffer; null: it is. Called with the mailbox locked. An
  // error aborts the group.
  std::function<bool()> is_ready = {};

 private:
  friend class Mailbox;

  uint64_t left() const { return envelope.bytes - moved_; }
  // Marks this transfer as done. Returns true if a thread sleeps until it is. Doorbell explains the
  // memory order.
  bool finish(std::exception_ptr error) {
    if (!error) moved_ = envelope.bytes;
    error_ = std::move(error);
    done_.store(true, std::memory_order_seq_cst);
    return sleepers_.load(std::memory_order_seq_cst) != 0;
  }
  void count_sleeper(int more) { sleepers_.fetch_add(more, std::memory_order_seq_cst); }

  const MemoryOwner owner_;
  std::byte* const buffer_;
  // These three members are accessed with the mailbox locked.
  uint64_t number_ = 0;   // send: sequence number among the messages to its peer
  bool matched_ = false;  // receive: a message has been matched
  uint64_t moved_ = 0;

  std::atomic<Rank> peer_;
  std::atomic<bool> posted_{false};
  std::atomic<bool> done_{false};
  std::atomic<int> sleepers_{0};
  std::exception_ptr error_;
};
using TransferPtr = std::shared_ptr<Transfer>;

// Returns the error if sizes or dtypes differ, with the same message on sender and receiver; else
// null.
std::exception_ptr mismatch(Rank from, const Envelope& sent, Rank to, const Envelope& wanted);

}  // namespace pycollect::ipc
