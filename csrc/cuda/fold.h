// The one kernel of the device: every dst[i] = srcs[0][i] op srcs[1][i] op ..., in 16-byte packets
// with all loads of a packet before its first add, each element by one thread, in rank order and
// rounded once. A dst may be a src. Constexpr: `Machine` is how memory is reached, a GPU or a test.
#pragma once
#include "elements.h"
#include "thread_work.h"

namespace pycollect::cuda {

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
    each<kLanes>([&](auto j) { at[j] = K::combined(at[j], kernel.decode(machine, lanes.at[j])); });
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
    Sums<K, V> sums = {};
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

// As many whole batches of packets as there are, for a number of sources that is known; returns the
// first slot left.
template <int kSrcs, class F>
constexpr int64_t fold_batches(const F& fold, const Line& line, ThreadShare share) {
  constexpr int kPackets = kInFlight / kSrcs;
  int64_t slot = share.first;
  for (; slot + (kPackets - 1) * share.step < line.wide; slot += kPackets * share.step)
    fold.template packets<kSrcs, kPackets>(line.byte_of_wide(slot), share.step * kPacketBytes);
  return slot;
}

template <class K, class Machine>
constexpr int64_t fold_known(const Folder<K, Machine, Flat>& fold, const Line& line,
                             ThreadShare share) {
  if constexpr (!K::kHot) return share.first;
  switch (fold.srcs.n) {  // the same for a whole block
    case 2:
      return fold_batches<2>(fold, line, share);
    case 4:
      return fold_batches<4>(fold, line, share);
    case 8:
      return fold_batches<8>(fold, line, share);
    default:
      return share.first;
  }
}

// What a kernel of folds does.
template <class T, class Op, class Machine>
constexpr void run_folds(const TableHead& head, const uint64_t* words, ThreadId where,
                         const Machine& machine) {
  using K = Arithmetic<T, Op>;
  const BlockWork job(head, words, where);
  const TableRow& row = job.row;
  const K kernel(head, row.finishes);
  const Line line(row, sizeof(T));
  if (row.pitched) {
    const auto one = [&](int64_t at, int64_t bytes, bool wide) {
      const Folder<K, Machine, Pitched> fold{kernel,
                                             machine,
                                             {job.lists + row.dsts, row.n_dsts, at},
                                             {job.lists + row.srcs, row.n_srcs, at}};
      wide ? fold.template any<Packet>(bytes) : fold.template any<T>(bytes);
    };
    return walk_lines(line, row.lines, job.share, one);
  }
  const Folder<K, Machine, Flat> fold{
      kernel, machine, {job.lists + row.dsts, row.n_dsts}, {job.lists + row.srcs, row.n_srcs}};
  walk_line(
      line, fold_known(fold, line, job.share), job.share.step,
      [&](int64_t bytes) { fold.template any<Packet>(bytes); },
      [&](int64_t bytes) { fold.template any<T>(bytes); });
}

}  // namespace pycollect::cuda
