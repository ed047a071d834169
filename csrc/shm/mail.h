// A send or a receive that has been asked for, and what happened while such were moved on.
#pragma once
#include <atomic>
#include <exception>
#include <memory>
#include <string>

#include "mailbox.h"

namespace pycollect::shm {

class Mail final : public Mailbox::Transfer {
 public:
  static constexpr Rank kAnybody = -1;

  Mail(Rank peer, const Envelope& what, const std::byte* data)
      : envelope(what), from(data), there(what.bytes), peer_(peer) {}
  Mail(Rank peer, const Envelope& what, std::byte* data)
      : envelope(what), into(data), peer_(peer) {}

  bool done() const override { return done_.load(std::memory_order_seq_cst); }
  void rethrow() const override {
    if (done() && error_) std::rethrow_exception(error_);
  }
  Rank peer() const override { return peer_.load(std::memory_order_relaxed); }
  uint64_t moved() const override { return moved_.load(std::memory_order_acquire); }

  void set_moved(uint64_t bytes) { moved_.store(bytes, std::memory_order_release); }
  void set_peer(Rank peer) { peer_.store(peer, std::memory_order_relaxed); }
  // Returns whether a thread sleeps until this. See Bell for the order.
  bool finish(std::exception_ptr error) {
    if (!error) set_moved(envelope.bytes);
    error_ = std::move(error);
    done_.store(true, std::memory_order_seq_cst);
    return sleepers_.load(std::memory_order_seq_cst) != 0;
  }
  void count_sleeper(int more) { sleepers_.fetch_add(more, std::memory_order_seq_cst); }

  const Envelope envelope;
  const std::byte* from = nullptr;  // of a send: what has not been moved yet begins here
  uint64_t there = 0;               // of a send: bytes, from its first on, that may be read
  std::byte* into = nullptr;        // of a receive, as `from`
  bool matched = false;             // the message of this receive has been found

 private:
  std::atomic<Rank> peer_;
  std::atomic<uint64_t> moved_{0};
  std::atomic<bool> done_{false};
  std::atomic<int> sleepers_{0};
  std::exception_ptr error_;
};
using MailPtr = std::shared_ptr<Mail>;

// Collected while the mailbox is locked, acted on when things have been moved.
struct Effects {
  uint64_t touched = 0;  // bit r: something was done that rank r may sleep for
  int finished = 0;
  bool awaited = false;  // another thread of this rank sleeps for something that has finished
  static_assert(kMostRanks <= 64);

  void touch(Rank r) { touched |= uint64_t{1} << r; }
  void finish(Mail& mail, std::exception_ptr error = nullptr) {
    awaited |= mail.finish(std::move(error));
    ++finished;
  }
};

// The same sentence on both sides.
std::exception_ptr mismatch(Rank from, const Envelope& sent, Rank to, const Envelope& wanted);

}  // namespace pycollect::shm
