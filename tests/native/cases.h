// Random collective calls, each with its expected result: that of the same plan run by one thread
// in the written order, in one process. Every rank generates all of it from a seed.
#pragma once
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/cpu/executor.h"
#include "../../csrc/plan/error.h"
#include "../../csrc/plan/registry.h"
#include "../../csrc/rank_executor/call_buffers.h"
#include "../../csrc/rank_executor/shm_transport.h"

namespace pycollect::ipc {

using Bytes = std::vector<std::byte>;

struct Case {
  Collective collective;
  std::string algorithm;  // empty: the selector chooses
  DType dtype;
  ReduceOp op;
  Rank root;
  bool in_place, irregular;
  int tensors;               // number of tensors that each call buffer is spread over
  bool zero_copy;            // in the symmetric heap
  bool within;               // the rank's own block lies inside the buffer of all blocks
  std::vector<Sizes> sizes;  // element counts: [from][to], one row of blocks, or one number
  uint64_t seed;

  std::string describe() const {
    std::string description =
        text(name(collective), "/", algorithm, " ", name(dtype), " ", name(op), " root ", root,
             in_place ? " in place" : "", irregular ? " irregular" : "", " tensors ", tensors,
             zero_copy ? " zero-copy" : "", within ? " within" : "", " seed ", seed, " sizes");
    for (const Sizes& row : sizes)
      for (std::size_t n : row) description += text(" ", n);
    return description;
  }
};

// Fills `bytes` with numbers around one, so that the order of additions shows in the bits.
inline void fill(Bytes& bytes, DType t, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  struct Format {
    std::size_t width;
    int exponent, low;
  };
  const auto patch = [&](Format f, auto word) {
    using Word = decltype(word);
    for (std::size_t at = 0; at + sizeof(Word) <= bytes.size(); at += sizeof(Word)) {
      std::memcpy(&word, &bytes[at], sizeof word);
      const Word mask = ((Word{1} << f.width) - 1) << f.low;
      word = static_cast<Word>((word & ~mask) |
                               ((static_cast<Word>(f.exponent) + (word >> f.low & 1)) << f.low));
      std::memcpy(&bytes[at], &word, sizeof word);
    }
  };
  if (t == DType::f32 || t == DType::c64) patch({8, 126, 23}, uint32_t{});
  if (t == DType::f64 || t == DType::c128) patch({11, 1022, 52}, uint64_t{});
  if (t == DType::f16) patch({5, 14, 10}, uint16_t{});
  if (t == DType::bf16) patch({8, 126, 7}, uint16_t{});
  if (t == DType::f8e4m3) patch({4, 6, 3}, uint8_t{});
  if (t == DType::f8e5m2) patch({5, 14, 2}, uint8_t{});
  if (t == DType::boolean)
    for (std::byte& b : bytes) b &= std::byte{1};
}

inline std::size_t sum(const Sizes& s) {
  std::size_t all = 0;
  for (std::size_t n : s) all += n;
  return all;
}

// Block sizes of a rank's call buffers.
struct Blocks {
  Sizes in, out;            // as in CollectiveRequest; empty: the rank has no such buffer
  Sizes full_in, full_out;  // as in PlanOffsets: one entry per rank
};

inline Blocks blocks(const Case& c, Rank r, int world) {
  const auto own = [&](std::size_t n) {
    Sizes all(world, 0);
    all[r] = n;
    return all;
  };
  const Sizes& row = c.sizes[0];
  switch (c.collective) {
    case Collective::all_gather:
      return {{row[r]}, row, own(row[r]), row};
    case Collective::reduce_scatter:
      return {row, {row[r]}, row, own(row[r])};
    case Collective::all_to_all: {
      Blocks b{c.sizes[r], {}, c.sizes[r], {}};
      for (Rank from = 0; from < world; ++from) b.out.push_back(c.sizes[from][r]);
      b.full_out = b.out;
      return b;
    }
    case Collective::gather:
      return {
          {row[r]}, r == c.root ? row : Sizes{}, own(row[r]), r == c.root ? row : Sizes(world, 0)};
    case Collective::scatter:
      return {
          r == c.root ? row : Sizes{}, {row[r]}, r == c.root ? row : Sizes(world, 0), own(row[r])};
    case Collective::reduce:
      return {row, r == c.root || c.in_place ? row : Sizes{}, row, row};
    case Collective::broadcast:
      return {r == c.root || c.in_place ? row : Sizes{}, row, row, row};
    default:
      return {row, row, row, row};
  }
}

inline Bytes make_input(const Case& c, Rank r, int world) {
  Bytes input(sum(blocks(c, r, world).full_in) * item_bytes(c.dtype));
  fill(input, c.dtype, c.seed * 1000 + r);
  return input;
}
inline Bytes initial_output(const Case& c, Rank r, int world) {
  return Bytes(sum(blocks(c, r, world).full_out) * item_bytes(c.dtype), std::byte{0x5a});
}

// Expected contents of every rank's buffers after the call.
struct Outcome {
  std::vector<Bytes> in, out;  // in place: both are the input buffers
};
inline Outcome expected(const Case& c, const std::string& algorithm, int world) {
  const std::size_t item = item_bytes(c.dtype);
  const bool alone = world == 1;
  const Algorithm& a = find(c.collective, algorithm);
  const auto plan = compiled(a, {world, c.root, 4}, c.in_place);
  std::vector<Bytes> in, out, scratch;
  const Sizes uniform =
      alone ? Sizes{sum(blocks(c, 0, 1).full_in)} : blocks(c, c.root, world).full_in;
  PlanOffsets offsets(plan->plan, uniform, 64 / item);  // cut as in the one-process API
  std::vector<BufferMemory> memory;
  for (Rank r = 0; r < world; ++r) {
    const Blocks b = blocks(c, r, world);
    if (!alone) offsets.set(r, Buffer::input, b.full_in);
    if (!alone) offsets.set(r, Buffer::output, b.full_out);
    in.push_back(make_input(c, r, world));
    out.push_back(initial_output(c, r, world));
    scratch.emplace_back(std::max(in[r].size(), out[r].size()) + item);
  }
  for (Rank r = 0; r < world; ++r) {
    memory.insert(memory.end(), {BufferMemory{in[r].data()},
                                 BufferMemory{c.in_place ? in[r].data() : out[r].data()},
                                 BufferMemory{scratch[r].data()}});
    memory.resize(static_cast<std::size_t>(r + 1) * kBuffers);  // no host memory, no accumulators
  }
  const std::vector<Binding> bindings{{&offsets, memory}};
  cpu::run_in_order({*plan, bindings, c.dtype, c.op, {.world = world}});
  return {in, c.in_place ? in : out};
}

// Picks random cases from a seed.
class Picker {
 public:
  Picker(int world, uint64_t seed) : world_(world), random_(seed), seed_(seed) {}

  std::size_t below(std::size_t n) { return random_() % n; }
  std::size_t size() {
    static constexpr std::size_t kSizes[]{0,  1,  2,   3,   5,    17,   63,
                                          64, 65, 100, 129, 1000, 1025, 4099};
    return kSizes[below(std::size(kSizes))];
  }

  Case pick() {
    Case c{};
    c.seed = seed_;
    c.collective = static_cast<Collective>(below(static_cast<std::size_t>(Collective::barrier)));
    const auto all = algorithms(c.collective);
    const Algorithm* a = all[below(all.size())];
    if (below(2) == 0) c.algorithm = a->name;
    do {
      c.dtype = static_cast<DType>(below(DTypes::size));
      c.op = static_cast<ReduceOp>(below(ReduceOps::size));
    } while (!reduces(c.dtype, c.op));
    c.root = static_cast<Rank>(below(world_));
    const bool whole = c.collective == Collective::all_reduce ||
                       c.collective == Collective::reduce || c.collective == Collective::broadcast;
    c.in_place = whole && below(2) == 0;
    c.tensors = below(3) == 0 ? 3 : 1;
    c.zero_copy = below(2) == 0;
    c.within = c.tensors == 1 && below(3) == 0;
    const std::size_t n = size();
    if (whole)
      c.sizes = {{n}};
    else if (c.collective == Collective::all_to_all)
      c.sizes.assign(world_, Sizes(world_, n));
    else
      c.sizes = {Sizes(world_, n)};
    const bool varies =
        c.collective == Collective::all_gather || c.collective == Collective::reduce_scatter;
    if (!whole && below(2) == 0) {
      c.irregular = !varies;
      for (Sizes& row : c.sizes)
        for (std::size_t& block : row) block = size();
    }
    return c;
  }

 private:
  int world_;
  std::mt19937_64 random_;
  uint64_t seed_;
};

}  // namespace pycollect::ipc
