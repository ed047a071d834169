// The five ways of waiting, each as the exchange of a reduction on one rank: all ranks signal
// rank 0 that their words are ready, it sums them into all, and signals back.
#pragma once
#include "page.h"

namespace waits {

// The device, stream and memory with which one rank takes part in an exchange.
struct Station {
  Device& device;
  Rendezvous& meeting;
  Stream stream;
  std::vector<Word*> words;  // every rank's words, mapped in this process
  std::size_t count;
  Word* wrong;  // error count in device memory
};

inline Word sum_of(Word round, int world) { return round * world + world * (world - 1) / 2; }

class Way {
 public:
  explicit Way(const Station& station) : s(station) {}
  virtual ~Way() = default;

  // Runs one exchange; rounds count up from 1, equal on all ranks.
  void publish_and_agree(Word round) {
    const int rank = s.meeting.rank(), world = s.meeting.world();
    Word* const mine = s.words[rank];
    s.device.fill(s.stream, mine, s.count, round + rank);
    hand_over(round);
    s.device.compare(s.stream, mine, s.count, sum_of(round, world), s.wrong);
  }

 protected:
  virtual void hand_over(Word round) {
    if (s.meeting.rank() != 0) {
      release(round);
      return await(0, round);
    }
    for (int peer = 1; peer < s.meeting.world(); ++peer) await(peer, round);
    s.device.sum(s.stream, s.words, s.count);
    release(round);
  }
  // Signals a round: all earlier work of this rank's stream is done before any peer's stream passes
  // an `await` for this rank and round.
  virtual void release(Word round) = 0;
  virtual void await(int peer, Word round) = 0;

  void post(Word round) { s.meeting.mine().posted.value.store(round, std::memory_order_release); }
  void see(int peer, Word round) { s.meeting.await(s.meeting.of(peer).posted.value, round); }

  const Station s;
};

// Stream memory operations on counters in device memory, or in shared pinned memory. A wait is
// enqueued only after its release has been enqueued, so it always ends.
class Counters final : public Way {
 public:
  Counters(const Station& station, std::vector<Word*> counters)
      : Way(station), counters_(std::move(counters)) {}

 private:
  void release(Word round) override {
    s.device.write(s.stream, counters_[s.meeting.rank()], round);
    post(round);
  }
  void await(int peer, Word round) override {
    see(peer, round);
    s.device.wait(s.stream, counters_[peer], round);
  }
  const std::vector<Word*> counters_;
};

// Interprocess events. An event is recorded again only after all peers have enqueued their waits.
class Events final : public Way {
 public:
  Events(const Station& station, std::vector<Event> events)
      : Way(station), events_(std::move(events)) {}

 private:
  void release(Word round) override {
    s.device.record(events_[s.meeting.rank()], s.stream);
    post(round);
  }
  void await(int peer, Word round) override {
    see(peer, round);
    s.device.hold(s.stream, events_[peer]);
  }
  const std::vector<Event> events_;
};

// Host waits: each host waits for its stream, then for the other hosts.
class Hosts final : public Way {
 public:
  using Way::Way;

 private:
  void release(Word round) override {
    s.device.synchronize(s.stream);
    post(round);
  }
  void await(int peer, Word round) override { see(peer, round); }
};

// Copies to shared pinned memory, sums there on rank 0's host, and copies back.
class Staged final : public Way {
 public:
  using Way::Way;

 private:
  void release(Word round) override { post(round); }
  void await(int peer, Word round) override { see(peer, round); }
  void hand_over(Word round) override {
    const int rank = s.meeting.rank(), world = s.meeting.world();
    Page& page = s.meeting.page();
    const std::size_t bytes = s.count * sizeof(Word);
    s.device.copy(s.stream, page.staging_buffer(rank), s.words[rank], bytes);
    s.device.synchronize(s.stream);
    if (rank != 0) {
      release(round);
      await(0, round);
    } else {
      for (int peer = 1; peer < world; ++peer) await(peer, round);
      for (std::size_t i = 0; i < s.count; ++i) {
        Word sum = 0;
        for (int r = 0; r < world; ++r) sum += page.staging_buffer(r)[i];
        page.staging_buffer(kMaxRanks)[i] = sum;
      }
      release(round);
    }
    s.device.copy(s.stream, s.words[rank], page.staging_buffer(kMaxRanks), bytes);
    s.device.synchronize(s.stream);  // before rank 0 overwrites the sum in the next round
  }
};

}  // namespace waits
