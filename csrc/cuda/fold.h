// The one kernel of the device: every dst[i] = srcs[0][i] op srcs[1][i] op ..., in 16-byte packets
// with all loads of a packet before its first add, each element by one thread, in rank order and
// rounded once. A dst may be a src. Constexpr: `Machine` is how memory is reached, a GPU or a test.
#pragma once
#include <utility>

#include "elements.h"

namespace pycollect::cuda {

// body(0), body(1), ...: as constants, so that arrays stay in registers.
template <int n, class Body>
constexpr void each(Body body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, n>{});
}

// Addresses of one list of a row, in its only line or in any of its lines.
struct Flat {
  const uint64_t* words;
  int n;
  constexpr uint64_t at(int i, int64_t bytes) const { return words[i] + bytes; }
};
struct Pitched {
  const uint64_t* words;
  int n;
  int64_t line;
  constexpr uint64_t at(int i, int64_t bytes) const {
    return words[i] + line * static_cast<int64_t>(words[n + i]) + bytes;
  }
};

// The accumulators of one access.
template <class K, class V>
struct Sums {
  using Lane = typename K::template Lane<V>;
  static constexpr int kLanes = sizeof(V) / sizeof(Lane);
  struct Lanes {
    Lane at[kLanes];
  };
  typename K::Acc at[kLanes];

  template <class Machine>
  constexpr void start(const K& kernel, const Machine& machine, V v) {
    const auto lanes = std::bit_cast<Lanes>(v);
    each<kLanes>([&](auto j) { at[j] = kernel.decode(machine, lanes.at[j]); });
  }
  template <class Machine>
  constexpr void add(const K& kernel, const Machine& machine, V v) {
    const auto lanes = std::bit_cast<Lanes>(v);
    each<kLanes>(
        [&](auto j) { at[j] = K::combined(at[j], kernel.decode(machine, lanes.at[j])); });
  }
  template <class Machine>
  constexpr V finish(const K& kernel, const Machine& machine) const {
    Lanes lanes = {};
    each<kLanes>([&](auto j) {
      lanes.at[j] = static_cast<Lane>(kernel.encode(machine, kernel.finished(at[j])));
    });
    return std::bit_cast<V>(lanes);
  }
};

// One row's step for one thread, at `bytes` from the beginning of a line.
template <class K, class Machine, class List>
struct Folder {
  const K& kernel;
  const Machine& machine;
  List dsts, srcs;

  // kSrcs sources, kPackets packets `stride` bytes apart, all in flight together.
  template <int kSrcs, int kPackets>
  constexpr void packets(int64_t bytes, int64_t stride) const {
    Packet v[kSrcs * kPackets] = {};
    each<kPackets>([&](auto p) {
      each<kSrcs>([&](auto s) {
        v[p * kSrcs + s] = machine.template load<Packet>(srcs.at(s, bytes + p * stride));
      });
    });
    Packet results[kPackets] = {};
    each<kPackets>([&](auto p) {
      Sums<K, Packet> sums;
      sums.start(kernel, machine, v[p * kSrcs]);
      each<kSrcs - 1>([&](auto s) { sums.add(kernel, machine, v[p * kSrcs + s + 1]); });
      results[p] = sums.finish(kernel, machine);
    });
    for (int d = 0; d < dsts.n; ++d)
      each<kPackets>([&](auto p) { machine.store(dsts.at(d, bytes + p * stride), results[p]); });
  }

  // Any number of sources, a batch of loads in flight.
  template <class V>
  constexpr void any(int64_t bytes) const {
    constexpr int kBatch = 4;
    Sums<K, V> sums;
    for (int done = 0; done < srcs.n; done += kBatch) {
      V v[kBatch] = {};
      each<kBatch>([&](auto s) {
        if (done + s < srcs.n) v[s] = machine.template load<V>(srcs.at(done + s, bytes));
      });
      each<kBatch>([&](auto s) {
        if (done + s >= srcs.n) return;
        if (s == 0 && done == 0)
          sums.start(kernel, machine, v[s]);
        else
          sums.add(kernel, machine, v[s]);
      });
    }
    const V result = sums.finish(kernel, machine);
    for (int d = 0; d < dsts.n; ++d) machine.store(dsts.at(d, bytes), result);
  }
};

// Slots of a row with one line, from `slot` on.
template <class Wide, class Edge>
constexpr void walk_line(const Line& line, int64_t slot, int64_t step, Wide wide, Edge edge) {
  for (; slot < line.wide; slot += step) wide(line.unit_of_wide(slot));
  for (; slot < line.slots(); slot += step) edge(line.unit_of_edge(slot));
}

// Slots of a row with many lines; body(line, unit, is it wide). Divides once, not for each slot.
template <class Body>
constexpr void walk_lines(const Line& line, int64_t lines, Share share, Body body) {
  const int64_t slots = line.slots();
  int64_t at = share.first / slots, slot = share.first % slots;
  const int64_t more_lines = share.step / slots, more_slots = share.step % slots;
  while (at < lines) {
    const bool wide = slot < line.wide;
    body(at, wide ? line.unit_of_wide(slot) : line.unit_of_edge(slot), wide);
    at += more_lines;
    slot += more_slots;
    if (slot >= slots) {
      slot -= slots;
      ++at;
    }
  }
}

// So many 16-byte loads of one thread are in flight, if it has them: fewer do not hide the latency
// of memory with two sources, more need registers that other blocks could use.
inline constexpr int kInFlight = 8;

// As many whole batches of packets as there are, for a number of sources that is known; returns the
// first slot left.
template <int kSrcs, class F>
constexpr int64_t fold_batches(const F& fold, const Line& line, Share share) {
  constexpr int kPackets = kInFlight / kSrcs;
  const int64_t stride = share.step * kPacketBytes;
  int64_t slot = share.first;
  for (; slot + (kPackets - 1) * share.step < line.wide; slot += kPackets * share.step)
    fold.template packets<kSrcs, kPackets>(line.unit_of_wide(slot) * kPacketBytes / line.per_wide,
                                           stride);
  return slot;
}

// Where a thread is.
struct Where {
  uint32_t block, blocks, thread;
};

struct Job {
  TableRow row;
  Share share;
  const uint64_t* lists;
  constexpr Job(const TableHead& head, const uint64_t* words, Where where)
      : row(), share(), lists(words + head.rows * kRowWords) {
    const int rows = static_cast<int>(head.rows), index = row_of(words, rows, where.block);
    row = row_at(words, index);
    const uint32_t end =
        index + 1 < rows ? row_at(words, index + 1).first_block : where.blocks;
    share = pycollect::cuda::share(row, end, where.block, where.thread);
  }
};

}  // namespace pycollect::cuda
