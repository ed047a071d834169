// The copy kernel: copies the bytes of a task's source to every destination. Its accesses have 1 to
// 16 bytes: the largest such power of two modulo which all addresses of the task are equal.
#pragma once
#include "thread_share.h"

namespace pycollect::cuda {

// Copies one task by one thread, in accesses of type V, at `bytes` from the beginning of a row.
template <class V, class Accessor, class List>
struct Copier {
  const Accessor& accessor;
  List dsts, src;

  constexpr void one(int64_t bytes) const {
    const V v = accessor.template load<V>(src.at(0, bytes));
    for (int d = 0; d < dsts.n; ++d) accessor.store(dsts.at(d, bytes), v);
  }

  // Copies kMany values, `stride` bytes apart, with all loads in flight together.
  template <int kMany>
  constexpr void many(int64_t bytes, int64_t stride) const {
    V v[kMany] = {};
    each<kMany>([&](auto i) { v[i] = accessor.template load<V>(src.at(0, bytes + i * stride)); });
    for (int d = 0; d < dsts.n; ++d)
      each<kMany>([&](auto i) { accessor.store(dsts.at(d, bytes + i * stride), v[i]); });
  }
};

template <class V, class Accessor>
constexpr void copy_share(const BlockTask& block, const Accessor& accessor) {
  const TaskArgs& task = block.task;
  const ThreadShare share = block.share;
  const RowAccesses row(task, sizeof(V), 1);
  const auto on = [&](auto dsts, auto src) {
    return [&accessor, dsts, src]<class W>(std::type_identity<W>) {
      return Copier<W, Accessor, decltype(dsts)>{accessor, dsts, src};
    };
  };
  const std::type_identity<V> wide;
  const std::type_identity<uint8_t> edge;
  const uint64_t *dsts = block.lists + task.dsts, *src = block.lists + task.srcs;
  if (task.pitched) {
    return walk_rows(row, task.rows, share, [&](int64_t at, int64_t access) {
      const auto copy = on(PitchedAddresses{dsts, task.n_dsts, at}, PitchedAddresses{src, 1, at});
      access < row.wide ? copy(wide).one(row.byte_of_wide<V>(access))
                        : copy(edge).one(row.byte_of_edge(access));
    });
  }
  const auto copy = on(FlatAddresses{dsts, task.n_dsts}, FlatAddresses{src, 1});
  int64_t access = share.first;
  for (; access + (kInFlight - 1) * share.step < row.wide; access += kInFlight * share.step)
    copy(wide).template many<kInFlight>(row.byte_of_wide<V>(access), share.step * sizeof(V));
  for (; access < row.wide; access += share.step) copy(wide).one(row.byte_of_wide<V>(access));
  for (; access < row.size(); access += share.step) copy(edge).one(row.byte_of_edge(access));
}

// Body of the copy kernel, for one thread.
template <class Accessor>
constexpr void run_copies(const ArgsHead& head, const uint64_t* words, ThreadId id,
                          const Accessor& accessor) {
  const BlockTask block(head, words, id);
  switch (block.task.width) {  // uniform in a block
    case 16:
      return copy_share<Packet>(block, accessor);
    case 8:
      return copy_share<uint64_t>(block, accessor);
    case 4:
      return copy_share<uint32_t>(block, accessor);
    case 2:
      return copy_share<uint16_t>(block, accessor);
    default:
      return copy_share<uint8_t>(block, accessor);
  }
}

}  // namespace pycollect::cuda
