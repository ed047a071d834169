// Random collective calls, each with its expected result: that of the same plan run by one thread
// in the written order, in one process. Every rank generates all of it from a seed.
#pragma once
#include <numeric>
#include <random>

#include "../../csrc/cpu/executor.h"
#include "../../csrc/plan/registry.h"
#include "../../csrc/rank_executor/request.h"
#include "ranks.h"

namespace pycollect::ipc {

using Bytes = std::vector<std::byte>;

struct Case {
  int world;
  uint64_t seed;
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

  std::string describe() const {
    return text(name(collective), "/", algorithm, " ", name(dtype), " ", name(op), " root ", root,
                in_place ? " in place" : "", within ? " within" : "", ", seed ", seed);
  }
};

inline Case random_case(int world, uint64_t seed) {
  static constexpr std::size_t kSizes[]{0, 1, 2, 3, 5, 17, 63, 64, 65, 100, 129, 1000, 1025, 4099};
  std::mt19937_64 random(seed);
  const auto below = [&](std::size_t n) { return random() % n; };
  const auto size = [&] { return kSizes[below(std::size(kSizes))]; };
  Case c{};
  c.world = world, c.seed = seed;
  c.collective = static_cast<Collective>(below(static_cast<std::size_t>(Collective::barrier)));
  const auto all = algorithms(c.collective);
  if (below(2) == 0) c.algorithm = all[below(all.size())]->name;
  do {
    c.dtype = static_cast<DType>(below(DTypes::size));
    c.op = static_cast<ReduceOp>(below(ReduceOps::size));
  } while (!reduces(c.dtype, c.op));
  c.root = static_cast<Rank>(below(world));
  const bool whole = c.collective == Collective::all_reduce || c.collective == Collective::reduce ||
                     c.collective == Collective::broadcast;
  c.in_place = whole && below(2) == 0;
  c.tensors = below(3) == 0 ? 3 : 1;
  c.zero_copy = below(2) == 0;
  c.within = c.tensors == 1 && below(3) == 0;
  c.sizes.assign(c.collective == Collective::all_to_all ? world : 1,
                 Sizes(whole ? 1 : world, size()));
  if (whole || below(2) == 0) return c;
  c.irregular =
      c.collective != Collective::all_gather && c.collective != Collective::reduce_scatter;
  for (Sizes& row : c.sizes)
    for (std::size_t& block : row) block = size();
  return c;
}

// Random bytes; floats of some size around one, so that the order of additions shows in the bits.
inline void fill(Bytes& bytes, DType t, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto mask = static_cast<std::byte>(t == DType::boolean ? 1 : 255);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random()) & mask;
  if (t >= DType::i8 && t < DType::c64) return;
  const std::size_t real = item_bytes(t) / (t >= DType::c64 ? 2 : 1);
  for (std::size_t at = real - 1; at < bytes.size(); at += real)  // sign and most of the exponent
    bytes[at] = (bytes[at] & std::byte{7}) | std::byte{0x38};
}

// Block sizes of a rank's call buffer, as in CollectiveRequest, and of all ranks, as in
// PlanOffsets: one entry per rank.
struct Blocks {
  Sizes own, full;
};
inline Blocks blocks(const Case& c, Rank r, bool output) {
  Sizes row = c.sizes[0];
  for (Rank other = 0; c.collective == Collective::all_to_all && other < c.world; ++other)
    row[other] = output ? c.sizes[other][r] : c.sizes[r][other];
  const BlockContent content =
      output ? output_of(c.collective, false) : input_of(c.collective, false);
  Sizes mine(c.world, 0);
  if (content == BlockContent::own_block) {
    mine[r] = row[r];
    return {{row[r]}, mine};
  }
  const bool of_root =
      output ? c.collective == Collective::gather || c.collective == Collective::reduce
             : c.collective == Collective::scatter || c.collective == Collective::broadcast;
  if (of_root && r != c.root && !c.in_place)
    return {{}, content == BlockContent::all_blocks ? mine : row};
  return {row, row};
}

inline Bytes initial(const Case& c, Rank r, bool output) {
  const Sizes full = blocks(c, r, output).full;
  Bytes content(std::reduce(full.begin(), full.end()) * item_bytes(c.dtype), std::byte{0x5a});
  if (!output) fill(content, c.dtype, c.seed * 1000 + r);
  return content;
}

// Expected contents of every rank's buffers after the call.
struct Outcome {
  std::vector<Bytes> in, out;  // in place: both are the input buffers
};
inline Outcome expected(const Case& c, const std::string& algorithm) {
  const std::size_t item = item_bytes(c.dtype);
  const CompiledPlan& compiled_plan =
      compiled({&find(c.collective, algorithm), c.world, c.root, 4, c.in_place});
  std::vector<Bytes> in, out, scratch;
  const Sizes all = blocks(c, c.root, false).full;
  // Cut as in the one-process API.
  PlanOffsets offsets(compiled_plan.plan,
                      c.world == 1 ? Sizes{std::reduce(all.begin(), all.end())} : all, 64 / item);
  for (Rank r = 0; r < c.world; ++r) {
    if (c.world > 1) offsets.set(r, Buffer::input, blocks(c, r, false).full);
    if (c.world > 1) offsets.set(r, Buffer::output, blocks(c, r, true).full);
    in.push_back(initial(c, r, false));
    out.push_back(initial(c, r, true));
    scratch.emplace_back(std::max(in[r].size(), out[r].size()) + item);
  }
  std::vector<BufferMemory> memory(static_cast<std::size_t>(c.world) * kBuffers);
  for (Rank r = 0; r < c.world; ++r) {  // no host memory, no accumulators
    std::byte* const bases[] = {in[r].data(), (c.in_place ? in : out)[r].data(), scratch[r].data()};
    for (int i = 0; i < 3; ++i) memory[r * kBuffers + i].base = bases[i];
  }
  cpu::run_in_order({compiled_plan,
                     c.dtype,
                     c.op,
                     {.world = c.world},
                     {{std::move(offsets), std::move(memory)}}});
  return {in, c.in_place ? in : out};
}

}  // namespace pycollect::ipc
