// The fold kernel in rank order: every dst[i] = srcs[0][i] op srcs[1][i] op ..., in 16-byte
// packets, striped ones if addresses differ modulo 16, with all loads of a packet before its first
// add. One thread computes an element, in the order of the sources, and rounds it once. A dst may
// be a src. The functions are constexpr and access memory through an `Accessor`: that of a GPU, or
// in tests that of the host.
#pragma once
#include "elements.h"
#include "thread_share.h"

namespace pycollect::cuda {

// Accumulators of the elements of one access.
template <class K, class V>
struct Sums {
  using Lane = typename K::template Lane<V>;
  static constexpr int kLanes = sizeof(V) / sizeof(Lane);
  struct Lanes {
    Lane at[kLanes];
  };
  typename K::Acc at[kLanes];

  template <class Accessor>
  constexpr void start(const K& kernel, const Accessor& accessor, V v) {
    const auto lanes = std::bit_cast<Lanes>(v);
    each<kLanes>([&](auto j) { at[j] = kernel.decode(accessor, lanes.at[j]); });
  }
  template <class Accessor>
  constexpr void add(const K& kernel, const Accessor& accessor, V v) {
    const auto lanes = std::bit_cast<Lanes>(v);
    each<kLanes>([&](auto j) { at[j] = K::combined(at[j], kernel.decode(accessor, lanes.at[j])); });
  }
  constexpr void combine(const Sums& right) {
    each<kLanes>([&](auto j) { at[j] = K::combined(at[j], right.at[j]); });
  }
  template <class Accessor>
  constexpr V finish(const K& kernel, const Accessor& accessor) const {
    Lanes lanes = {};
    each<kLanes>([&](auto j) {
      lanes.at[j] = static_cast<Lane>(kernel.encode(accessor, kernel.finished(at[j])));
    });
    return std::bit_cast<V>(lanes);
  }
};

template <class V, class Accessor>
constexpr V load(const Accessor& accessor, uint64_t at) {
  if constexpr (is_striped<V>) {
    V v = {};
    each<V::kWords>([&](auto i) {
      v.words[i] = accessor.template load<typename V::Word>(at + i * V::kStride);
    });
    return v;
  } else {
    return accessor.template load<V>(at);
  }
}
template <class V, class Accessor>
constexpr void store(const Accessor& accessor, uint64_t at, V v) {
  if constexpr (is_striped<V>)
    each<V::kWords>([&](auto i) { accessor.store(at + i * V::kStride, v.words[i]); });
  else
    accessor.store(at, v);
}

// Folds kPackets packets, `stride` bytes apart, of kSrcs sources, with all loads in flight
// together. `combined(v)` returns the sums of a packet of each source.
template <int kSrcs, int kPackets, class Folder, class Combined>
constexpr void fold_packets(const Folder& fold, int64_t bytes, int64_t stride, Combined combined) {
  Packet v[kSrcs * kPackets] = {};
  each<kPackets>([&](auto p) {
    each<kSrcs>([&](auto s) {
      v[p * kSrcs + s] = fold.accessor.template load<Packet>(fold.srcs.at(s, bytes + p * stride));
    });
  });
  Packet results[kPackets] = {};
  each<kPackets>(
      [&](auto p) { results[p] = combined(v + p * kSrcs).finish(fold.kernel, fold.accessor); });
  for (int d = 0; d < fold.dsts.n; ++d)
    each<kPackets>(
        [&](auto p) { fold.accessor.store(fold.dsts.at(d, bytes + p * stride), results[p]); });
}

// Folds one task by one thread, at `bytes` from the beginning of a row.
template <class K, class Accessor, class List>
struct Folder {
  const K& kernel;
  const Accessor& accessor;
  List dsts, srcs;

  template <int kSrcs, int kPackets>
  constexpr void packets(int64_t bytes, int64_t stride) const {
    fold_packets<kSrcs, kPackets>(*this, bytes, stride, [&](const Packet* v) {
      Sums<K, Packet> sums;
      sums.start(kernel, accessor, v[0]);
      each<kSrcs - 1>([&](auto s) { sums.add(kernel, accessor, v[s + 1]); });
      return sums;
    });
  }

  // Folds any number of sources, with a batch of loads in flight: 4, or 16 of a striped packet's
  // units, each of which takes a register, like the words of 4 packets.
  template <class V>
  constexpr void any(int64_t bytes) const {
    constexpr int kBatch = is_striped<V> ? 16 * alignof(V) / sizeof(V) : 4;
    Sums<K, V> sums = {};
    for (int done = 0; done < srcs.n; done += kBatch) {
      V v[kBatch] = {};
      each<kBatch>([&](auto s) {
        if (done + s < srcs.n) v[s] = load<V>(accessor, srcs.at(done + s, bytes));
      });
      each<kBatch>([&](auto s) {
        if (done + s >= srcs.n) return;
        if (s == 0 && done == 0)
          sums.start(kernel, accessor, v[s]);
        else
          sums.add(kernel, accessor, v[s]);
      });
    }
    const V result = sums.finish(kernel, accessor);
    const auto store_at = [&](int d) { store(accessor, dsts.at(d, bytes), result); };
    if constexpr (K::kRolled)
      accessor.repeat(dsts.n, store_at);
    else
      for (int d = 0; d < dsts.n; ++d) store_at(d);
  }
};

// Folds all whole batches of packets, for a number of sources known at compile time. Returns the
// thread's first access that is not folded.
template <int kSrcs, class F>
constexpr int64_t fold_batches(const F& fold, const RowAccesses& row, ThreadShare share) {
  constexpr int kPackets = kInFlight / kSrcs;
  int64_t access = share.first;
  for (; access + (kPackets - 1) * share.step < row.wide; access += kPackets * share.step)
    fold.template packets<kSrcs, kPackets>(row.byte_of_wide<Packet>(access),
                                           share.step * kPacketBytes);
  return access;
}

template <class K, class Accessor>
constexpr int64_t fold_known(const Folder<K, Accessor, FlatAddresses>& fold, const RowAccesses& row,
                             ThreadShare share) {
  if constexpr (!K::kHot) return share.first;
  switch (fold.srcs.n) {  // uniform in a block
    case 2:
      return fold_batches<2>(fold, row, share);
    case 4:
      return fold_batches<4>(fold, row, share);
    case 8:
      return fold_batches<8>(fold, row, share);
    default:
      return share.first;
  }
}

// Calls body with the type of a task's wide accesses, if it has any.
template <class T, class Body>
constexpr void with_wide_type(const TaskArgs& task, Body body) {
  if (task.width == kPacketBytes) return body(std::type_identity<Packet>{});
  if constexpr (sizeof(T) <= kMaxStripedBytes)
    if (task.width == sizeof(T)) body(std::type_identity<Striped<T>>{});
}

// Body of a fold kernel, for one thread.
template <class T, class Op, class Accessor>
constexpr void run_folds(const ArgsHead& head, const uint64_t* words, ThreadId id,
                         const Accessor& accessor) {
  using K = Arithmetic<T, Op>;
  const BlockTask block(head, words, id);
  const TaskArgs& task = block.task;
  const K kernel(head, task.finishes);
  const RowAccesses row(task, kPacketBytes, sizeof(T));
  if (task.pitched) {
    const auto one = [&](int64_t at, int64_t access) {
      const Folder<K, Accessor, PitchedAddresses> fold{kernel,
                                                       accessor,
                                                       {block.lists + task.dsts, task.n_dsts, at},
                                                       {block.lists + task.srcs, task.n_srcs, at}};
      if (access >= row.wide) return fold.template any<T>(row.byte_of_edge(access));
      with_wide_type<T>(task, [&]<class V>(std::type_identity<V>) {
        fold.template any<V>(row.byte_of_wide<V>(access));
      });
    };
    return walk_rows(row, task.rows, block.share, one);
  }
  const Folder<K, Accessor, FlatAddresses> fold{kernel,
                                                accessor,
                                                {block.lists + task.dsts, task.n_dsts},
                                                {block.lists + task.srcs, task.n_srcs}};
  const int64_t step = block.share.step;
  int64_t access = block.share.first;
  with_wide_type<T>(task, [&]<class V>(std::type_identity<V>) {
    if constexpr (std::is_same_v<V, Packet>) access = fold_known(fold, row, block.share);
    for (; access < row.wide; access += step) fold.template any<V>(row.byte_of_wide<V>(access));
  });
  for (; access < row.size(); access += step) fold.template any<T>(row.byte_of_edge(access));
}

}  // namespace pycollect::cuda
