#include "blocks.h"

#include "../plan/error.h"

namespace pycollect {
namespace {

Sizes even_split(int64_t length, int parts) {
  Sizes s(parts);
  for (int r = 0; r < parts; ++r) s[r] = length / parts + (r < length % parts);
  return s;
}

// Returns the caller's block sizes for one rank, or an even split.
Sizes block_sizes(const BlockCut& cut, int64_t length, int rank) {
  const int parts = cut.outputs;
  if (!cut.sizes) return even_split(length, parts);
  const auto lists = static_cast<int>(cut.sizes->size());
  require(lists == 1 || lists == parts, name(cut.collective), ": split_sizes has lists for ", lists,
          " ranks; needed are ", parts);
  const auto& given = (*cut.sizes)[lists == 1 ? 0 : rank];
  const char* argument = cut.collective == Collective::scatter ? "chunk_sizes" : "split_sizes";
  int64_t total = 0;
  for (int64_t s : given) {
    require(s >= 0, name(cut.collective), ": ", argument, " has a negative size, ", s);
    require(!__builtin_add_overflow(total, s, &total), name(cut.collective), ": ", argument,
            " has sizes whose sum does not fit 64 bits; needed are ", parts, " that sum to ",
            length, ", the length along dim ", cut.dim);
  }
  require(static_cast<int>(given.size()) == parts && total == length, name(cut.collective), ": ",
          argument, " has ", given.size(), " sizes that sum to ", total, "; needed are ", parts,
          " that sum to ", length, ", the length along dim ", cut.dim);
  return {given.begin(), given.end()};
}

Sizes only_block(const Sizes& whole, Rank r) {
  Sizes s(whole.size());
  s[r] = whole[r];
  return s;
}

BlockSizes all_to_all_blocks(const BlockCut& cut) {
  BlockSizes b{{}, std::vector<Sizes>(cut.world, Sizes(cut.world)), Sizes(cut.world)};
  for (Rank r = 0; r < cut.world; ++r) b.in.push_back(block_sizes(cut, cut.lengths[r], r));
  for (Rank r = 0; r < cut.world; ++r)
    for (Rank p = 0; p < cut.world; ++p) b.out[r][p] = b.in[p][r];
  return b;
}

}  // namespace

BlockSizes blocks_of(const BlockCut& cut) {
  if (cut.collective == Collective::all_to_all) return all_to_all_blocks(cut);
  const bool joins =
      cut.collective == Collective::all_gather || cut.collective == Collective::gather;
  BlockSizes b{
      {},
      {},
      joins ? Sizes(cut.lengths.begin(), cut.lengths.end()) : block_sizes(cut, cut.lengths[0], 0)};
  b.whole.resize(cut.world);
  const Sizes none(cut.world);
  for (Rank r = 0; r < cut.world; ++r) {
    const bool reads_all = cut.collective == Collective::reduce_scatter || r == cut.root;
    const bool writes_all = cut.collective == Collective::all_gather || r == cut.root;
    b.in.push_back(joins ? only_block(b.whole, r) : reads_all ? b.whole : none);
    b.out.push_back(!joins ? only_block(b.whole, r) : writes_all ? b.whole : none);
  }
  return b;
}

int64_t sum(const Sizes& sizes, const char* call) {
  int64_t total = 0;
  for (const std::size_t s : sizes)  // expanded tensors and empty ones can have huge lengths
    require(!__builtin_add_overflow(total, s, &total), call,
            ": the lengths along dim have a sum that does not fit 64 bits");
  return total;
}

}  // namespace pycollect
