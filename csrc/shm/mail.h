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
      : envelope(what), from(data), peer_(peer) {}
  Mail(Rank peer, const Envelope& what, std::byte* data)
      : envelope(what), into(data), peer_(peer) {}
  Mail(Rank peer, const Envelope& what) : envelope(what), parcel(true), peer_(peer) {}

  bool done() const override { return done_.load(std::memory_order_seq_cst); }
  void rethrow() const override {
    if (done() && error_) std::rethrow_exception(error_);
  }
  Rank peer() const override { return peer_.load(std::memory_order_relaxed); }
  Mailbox::Turn turn() const override { return turn_.load(std::memory_order_acquire); }
  std::optional<Ticket> ticket() const override {
    return has_ticket ? std::optional(slip) : std::nullopt;
  }
  bool in_vain() const override { return vain; }

  void set_turn(Mailbox::Turn turn) { turn_.store(turn, std::memory_order_release); }
  void set_peer(Rank peer) { peer_.store(peer, std::memory_order_relaxed); }
  // Returns whether a thread sleeps until this. See Bell for the order.
  bool finish(std::exception_ptr error) {
    error_ = std::move(error);
    done_.store(true, std::memory_order_seq_cst);
    return sleepers_.load(std::memory_order_seq_cst) != 0;
  }
  void count_sleeper(int more) { sleepers_.fetch_add(more, std::memory_order_seq_cst); }

  const Envelope envelope;
  const bool parcel = false;
  const std::byte* from = nullptr;  // of a send: what has not been moved yet begins here
  std::byte* into = nullptr;        // the same of a receive
  bool matched = false;             // the message of this receive has been found
  // Of a parcel; written before its turn comes.
  Ticket slip = {};
  uint64_t number = 0;
  bool has_ticket = false, vain = false;

 private:
  std::atomic<Rank> peer_;
  std::atomic<Mailbox::Turn> turn_{Mailbox::Turn::none};
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
  int turns = 0;         // that have come to this rank
  static_assert(kMostRanks <= 64);

  void touch(Rank r) { touched |= uint64_t{1} << r; }
  void finish(Mail& mail, std::exception_ptr error = nullptr) {
    awaited |= mail.finish(std::move(error));
    ++finished;
  }
  void turn(Mail& mail, Mailbox::Turn turn) {
    mail.set_turn(turn);
    ++turns;
  }
};

// The same sentence on both sides.
std::exception_ptr mismatch(Rank from, const Envelope& sent, Rank to, const Envelope& wanted);

}  // namespace pycollect::shm
