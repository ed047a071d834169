// The copy kernel: copies the bytes of a work's source to every destination. Its accesses have 1 to
// 16 bytes: the largest such power of two modulo which all addresses of the work are equal.
#pragma once
#include "thread_work.h"

namespace pycollect::cuda {

// Copies one work by one thread, in accesses of type V, at `bytes` from the beginning of a line.
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
constexpr void copy_lines(const BlockWork& job, const Accessor& accessor) {
  const WorkArgs& work = job.work;
  const ThreadShare share = job.share;
  const LineAccesses line(work, sizeof(V), 1);
  const auto on = [&](auto dsts, auto src) {
    return [&accessor, dsts, src]<class W>(std::type_identity<W>) {
      return Copier<W, Accessor, decltype(dsts)>{accessor, dsts, src};
    };
  };
  const std::type_identity<V> wide;
  const std::type_identity<uint8_t> edge;
  const uint64_t *dsts = job.lists + work.dsts, *src = job.lists + work.srcs;
  if (work.pitched) {
    return walk_lines(line, work.lines, share, [&](int64_t at, int64_t slot) {
      const auto copy = on(PitchedAddresses{dsts, work.n_dsts, at}, PitchedAddresses{src, 1, at});
      slot < line.wide ? copy(wide).one(line.byte_of_wide<V>(slot))
                       : copy(edge).one(line.byte_of_edge(slot));
    });
  }
  const auto copy = on(FlatAddresses{dsts, work.n_dsts}, FlatAddresses{src, 1});
  int64_t slot = share.first;
  for (; slot + (kInFlight - 1) * share.step < line.wide; slot += kInFlight * share.step)
    copy(wide).template many<kInFlight>(line.byte_of_wide<V>(slot), share.step * sizeof(V));
  for (; slot < line.wide; slot += share.step) copy(wide).one(line.byte_of_wide<V>(slot));
  for (; slot < line.slots(); slot += share.step) copy(edge).one(line.byte_of_edge(slot));
}

// Body of the copy kernel, for one thread.
template <class Accessor>
constexpr void run_copies(const ArgsHead& head, const uint64_t* words, ThreadId id,
                          const Accessor& accessor) {
  const BlockWork job(head, words, id);
  switch (job.work.width) {  // uniform in a block
    case 16:
      return copy_lines<Packet>(job, accessor);
    case 8:
      return copy_lines<uint64_t>(job, accessor);
    case 4:
      return copy_lines<uint32_t>(job, accessor);
    case 2:
      return copy_lines<uint16_t>(job, accessor);
    default:
      return copy_lines<uint8_t>(job, accessor);
  }
}

}  // namespace pycollect::cuda
