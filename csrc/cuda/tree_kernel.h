// The fold kernel in tree order. Four or eight sources of a frequent type, all aligned to packets,
// are folded as by the kernel in rank order, with all loads before the first add; any other task
// unit by unit, with eight loads in flight and a sum for each power of two of sources. `Out` is
// T, or the accumulator's type for results that are not rounded.
#pragma once
#include "fold_kernel.h"

namespace pycollect::cuda {

template <class K, class Accessor, class List>
struct TreeFolder {
  using Acc = typename K::Acc;
  const K& kernel;
  const Accessor& accessor;
  List dsts, srcs;

  // The tree of kSrcs packets.
  template <int kSrcs>
  constexpr Sums<K, Packet> in_registers(const Packet* v) const {
    Sums<K, Packet> sums;
    if constexpr (kSrcs == 1) {
      sums.start(kernel, accessor, v[0]);
    } else {
      constexpr int kLeft = left_half(kSrcs);
      sums = in_registers<kLeft>(v);
      sums.combine(in_registers<kSrcs - kLeft>(v + kLeft));
    }
    return sums;
  }

  template <int kSrcs, int kPackets>
  constexpr void packets(int64_t bytes, int64_t stride) const {
    fold_packets<kSrcs, kPackets>(*this, bytes, stride,
                                  [&](const Packet* v) { return in_registers<kSrcs>(v); });
  }

  // A batch is the sources that are in flight together; of larger elements fewer have registers. A
  // bit is a sum of as many sources as it counts in a number of up to 512 sources.
  static constexpr int kBatchBits = sizeof(Acc) > 8 ? 2 : 3, kBatch = 1 << kBatchBits;
  static constexpr int kMoreBits = 9 - kBatchBits;
  static_assert(KernelArgs::kWords < kBatch << kMoreBits);

  // The tree of one unit. Sums wait for one of equally many sources, as the digits of a binary
  // counter do: those of fewer than a batch in `few`, those of more in `many`.
  template <class T>
  constexpr Acc unit(int64_t bytes) const {
    Acc few[kBatchBits] = {}, many[kMoreBits] = {};
    for (int done = 0; done < srcs.n; done += kBatch) {
      T v[kBatch] = {};
      each<kBatch>([&](auto s) {
        if (done + s < srcs.n) v[s] = accessor.template load<T>(srcs.at(done + s, bytes));
      });
      each<kBatch>([&](auto s) {
        if (done + s >= srcs.n) return;
        constexpr int kWaiting = std::countr_one(static_cast<unsigned>(s));
        Acc sum = kernel.decode(accessor, v[s]);
        each<kWaiting>([&](auto bit) { sum = K::combined(few[bit], sum); });
        if constexpr (s + 1 < kBatch)
          few[kWaiting] = sum;
        else
          carry(many, done / kBatch, sum);
      });
    }
    Acc sum = {};
    bool is_first = true;
    const auto from_right = [&](int bit, Acc left) {
      if ((srcs.n >> bit & 1) == 0) return;
      sum = is_first ? left : K::combined(left, sum);
      is_first = false;
    };
    each<kBatchBits>([&](auto bit) { from_right(bit, few[bit]); });
    each<kMoreBits>([&](auto bit) { from_right(kBatchBits + bit, many[bit]); });
    return sum;
  }

  // Adds the sum of batch number `batch`.
  static constexpr void carry(Acc (&many)[kMoreBits], int batch, Acc sum) {
    bool waits = false;
    each<kMoreBits>([&](auto bit) {
      if (waits) return;
      waits = (batch >> bit & 1) == 0;
      if (waits)
        many[bit] = sum;
      else
        sum = K::combined(many[bit], sum);
    });
  }

  template <class T, class Out>
  constexpr void fold_unit(int64_t bytes) const {
    const Acc sum = kernel.finished(unit<T>(bytes));
    for (int d = 0; d < dsts.n; ++d) {
      if constexpr (std::is_same_v<Out, T>)
        accessor.store(dsts.at(d, bytes), static_cast<T>(kernel.encode(accessor, sum)));
      else
        accessor.store(dsts.at(d, bytes / sizeof(T) * sizeof(Out)), static_cast<Out>(sum));
    }
  }
};

// Body of a kernel, for one thread.
template <class T, class Op, class Out, class Accessor>
constexpr void run_tree_folds(const ArgsHead& head, const uint64_t* words, ThreadId id,
                              const Accessor& accessor) {
  using K = Arithmetic<T, Op>;
  const BlockTask block(head, words, id);
  const TaskArgs& task = block.task;
  const K kernel(head, task.finishes);
  const RowAccesses row(task, kPacketBytes, sizeof(T));
  if (task.pitched) {
    const auto one = [&](int64_t at, int64_t access) {
      const TreeFolder<K, Accessor, PitchedAddresses> fold{
          kernel,
          accessor,
          {block.lists + task.dsts, task.n_dsts, at},
          {block.lists + task.srcs, task.n_srcs, at}};
      fold.template fold_unit<T, Out>(row.byte_of_edge(access));
    };
    return walk_rows(row, task.rows, block.share, one);
  }
  const TreeFolder<K, Accessor, FlatAddresses> fold{kernel,
                                                    accessor,
                                                    {block.lists + task.dsts, task.n_dsts},
                                                    {block.lists + task.srcs, task.n_srcs}};
  int64_t access = block.share.first;
  if constexpr (K::kHot && std::is_same_v<Out, T>) {
    if (task.n_srcs == 8) access = fold_batches<8>(fold, row, block.share);
    if (task.n_srcs == 4) access = fold_batches<4>(fold, row, block.share);
    for (; access < row.wide; access += block.share.step)  // less than a batch: of four sources
      fold.template packets<4, 1>(row.byte_of_wide<Packet>(access), 0);
  }
  for (; access < row.size(); access += block.share.step)
    fold.template fold_unit<T, Out>(row.byte_of_edge(access));
}

}  // namespace pycollect::cuda
