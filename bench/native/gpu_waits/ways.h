// The ways of waiting, each as the exchange of an all-reduce on rank 0: the other ranks signal
// rank 0 that their words are ready, it writes the sum to all ranks, and signals back.
#pragma once
#include "page.h"

namespace gpu_waits {

// Device, stream and memory of one rank in an exchange.
struct RankContext {
  Device& device;
  ProcessGroup& group;
  Stream stream;
  std::vector<Word*> words;  // every rank's words, mapped in this process
  std::vector<Word*> slots;  // every rank's slot, as large
  std::size_t count;
  Word* wrong;  // number of wrong words, in device memory
};

inline Word sum_of(Word round, int world) { return round * world + world * (world - 1) / 2; }

class Way {
 public:
  explicit Way(const RankContext& context) : context_(context) {}
  virtual ~Way() = default;

  // Runs one exchange. Rounds count up from 1, equal on all ranks.
  void exchange(Word round) {
    const int rank = context_.group.rank(), world = context_.group.world();
    Word* const mine = context_.words[rank];
    context_.device.fill(context_.stream, mine, context_.count, round + rank);
    reduce(round);
    context_.device.compare(context_.stream, mine, context_.count, sum_of(round, world),
                            context_.wrong);
  }

 protected:
  virtual void reduce(Word round) {
    if (context_.group.rank() != 0) {
      signal(round);
      return wait(0, round);
    }
    for (int peer = 1; peer < context_.group.world(); ++peer) wait(peer, round);
    context_.device.sum(context_.stream, context_.words, context_.count);
    signal(round);
  }
  // Signals a round: all earlier work of this rank's stream is done before the stream of any peer
  // passes a `wait` for this rank and round.
  virtual void signal(Word round) = 0;
  virtual void wait(int peer, Word round) = 0;

  void publish(Word round) {
    context_.group.mine().published.value.store(round, std::memory_order_release);
  }
  void wait_on_host(int peer, Word round) {
    context_.group.wait(context_.group.rank_state(peer).published.value, round);
  }

  const RankContext context_;
};

// Signals and waits are stream memory operations on counters in device memory, or in shared pinned
// memory. A wait is enqueued only after its signal has been enqueued, so it always ends.
class Counters : public Way {
 public:
  Counters(const RankContext& context, std::vector<Word*> counters)
      : Way(context), counters_(std::move(counters)) {}

 protected:
  void signal(Word round) override {
    context_.device.write(context_.stream, counters_[context_.group.rank()], round);
    publish(round);
  }
  void wait(int peer, Word round) override {
    wait_on_host(peer, round);
    context_.device.wait(context_.stream, counters_[peer], round);
  }

 private:
  const std::vector<Word*> counters_;
};

// Like Counters, for words that no other process has mapped: all ranks but rank 0 copy them to a
// slot and the sum back, by a kernel or by a copy engine. A kernel needs its process's context, and
// the GPU runs one context at a time.
class Slots final : public Counters {
 public:
  Slots(const RankContext& context, std::vector<Word*> counters, bool by_engine)
      : Counters(context, std::move(counters)), by_engine_(by_engine) {}

 private:
  void reduce(Word round) override {
    const int rank = context_.group.rank();
    Word *const mine = context_.words[rank], *const slot = context_.slots[rank];
    if (rank != 0) {
      copy(slot, mine);
      signal(round);
      wait(0, round);
      return copy(mine, slot);
    }
    std::vector<Word*> of = context_.slots;
    of[0] = mine;
    for (int peer = 1; peer < context_.group.world(); ++peer) wait(peer, round);
    context_.device.sum(context_.stream, of, context_.count);
    signal(round);
  }
  void copy(Word* to, const Word* from) {
    if (by_engine_)
      context_.device.copy(context_.stream, to, from, context_.count * sizeof(Word));
    else
      context_.device.copy_by_kernel(context_.stream, to, from, context_.count);
  }
  const bool by_engine_;
};

// Signals and waits are interprocess events. An event is recorded again only after all peers have
// enqueued their waits.
class Events final : public Way {
 public:
  Events(const RankContext& context, std::vector<Event> events)
      : Way(context), events_(std::move(events)) {}

 private:
  void signal(Word round) override {
    context_.device.record(events_[context_.group.rank()], context_.stream);
    publish(round);
  }
  void wait(int peer, Word round) override {
    wait_on_host(peer, round);
    context_.device.wait_event(context_.stream, events_[peer]);
  }
  const std::vector<Event> events_;
};

// Host waits: each host waits for its stream, then for the other hosts.
class Hosts final : public Way {
 public:
  using Way::Way;

 private:
  void signal(Word round) override {
    context_.device.synchronize(context_.stream);
    publish(round);
  }
  void wait(int peer, Word round) override { wait_on_host(peer, round); }
};

// Host staging: copies to shared pinned memory, a sum there by the host of rank 0, and copies back.
class Staged final : public Way {
 public:
  using Way::Way;

 private:
  void signal(Word round) override { publish(round); }
  void wait(int peer, Word round) override { wait_on_host(peer, round); }
  void reduce(Word round) override {
    const int rank = context_.group.rank(), world = context_.group.world();
    Page& page = context_.group.page();
    const std::size_t bytes = context_.count * sizeof(Word);
    context_.device.copy(context_.stream, page.staging_buffer(rank), context_.words[rank], bytes);
    context_.device.synchronize(context_.stream);
    if (rank != 0) {
      signal(round);
      wait(0, round);
    } else {
      for (int peer = 1; peer < world; ++peer) wait(peer, round);
      for (std::size_t i = 0; i < context_.count; ++i) {
        Word sum = 0;
        for (int r = 0; r < world; ++r) sum += page.staging_buffer(r)[i];
        page.staging_buffer(kMaxRanks)[i] = sum;
      }
      signal(round);
    }
    context_.device.copy(context_.stream, context_.words[rank], page.staging_buffer(kMaxRanks),
                         bytes);
    // Wait before rank 0 overwrites the sum in the next round.
    context_.device.synchronize(context_.stream);
  }
};

}  // namespace gpu_waits
