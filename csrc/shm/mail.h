// A send or a receive that has been asked for, and what happened while such were moved on.
#pragma once
#include <atomic>
#include <exception>
#include <memory>

#include "group.h"

namespace pycollect::shm {

struct Envelope {  // what both ends must agree on
  uint64_t bytes;
  uint8_t dtype;
  uint32_t tag;
};

inline constexpr Rank kAnybody = -1;  // whose message a receive takes

class Transfer {
 public:
  Transfer(Rank peer, const Envelope& what, const std::byte* data, uint64_t there)
      : envelope(what), from_(data), there_(there), peer_(peer) {}
  Transfer(Rank peer, const Envelope& what, std::byte* data)
      : envelope(what), into_(data), peer_(peer) {}

  // From any thread.
  bool done() const { return done_.load(std::memory_order_seq_cst); }  // moved whole, or failed
  void rethrow() const {  // what it failed with, if it did
    if (done() && error_) std::rethrow_exception(error_);
  }
  // Of a receive from anybody: known when it is found.
  Rank peer() const { return peer_.load(std::memory_order_relaxed); }
  // Bytes, from the first on: from here, or to here.
  uint64_t moved() const { return moved_.load(std::memory_order_acquire); }

  const Envelope envelope;

 private:
  friend class Mailbox;
  friend class Outgoing;
  friend class Incoming;
  friend struct Effects;

  void set_peer(Rank peer) { peer_.store(peer, std::memory_order_relaxed); }
  uint64_t left() const { return envelope.bytes - moved(); }
  void move_on(uint64_t bytes) { moved_.store(moved() + bytes, std::memory_order_release); }
  // Returns whether a thread sleeps until this. See Bell for the order.
  bool finish(std::exception_ptr error) {
    if (!error) move_on(left());
    error_ = std::move(error);
    done_.store(true, std::memory_order_seq_cst);
    return sleepers_.load(std::memory_order_seq_cst) != 0;
  }
  void count_sleeper(int more) { sleepers_.fetch_add(more, std::memory_order_seq_cst); }

  // With the mailbox locked.
  const std::byte* from_ = nullptr;  // of a send
  uint64_t there_ = 0;               // of a send: bytes, from its first on, that may be read
  uint64_t number_ = 0;              // of a send: of those to its peer
  std::byte* into_ = nullptr;        // of a receive
  bool matched_ = false;             // the message of this receive has been found

  std::atomic<Rank> peer_;
  std::atomic<uint64_t> moved_{0};
  std::atomic<bool> done_{false};
  std::atomic<int> sleepers_{0};
  std::exception_ptr error_;
};
using TransferPtr = std::shared_ptr<Transfer>;

// Collected while the mailbox is locked, acted on when things have been moved.
struct Effects {
  uint64_t touched = 0;  // bit r: something was done that rank r may sleep for
  int finished = 0;
  bool awaited = false;  // another thread of this rank sleeps for something that has finished
  static_assert(kMostRanks <= 64);

  void touch(Rank r) { touched |= uint64_t{1} << r; }
  void finish(Transfer& transfer, std::exception_ptr error = nullptr) {
    awaited |= transfer.finish(std::move(error));
    ++finished;
  }
};

// The same sentence on both sides.
std::exception_ptr mismatch(Rank from, const Envelope& sent, Rank to, const Envelope& wanted);

}  // namespace pycollect::shm
