// See prepared_request.h. Checks that a request's buffers fit its collective, and divides them into
// a rank program's chunks.
#include "prepared_request.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "../plan/error.h"
#include "fingerprint.h"

namespace pycollect::ipc {
namespace {

// Below this many bytes per rank, zero-copy is not tried: copying so little is cheaper than waiting
// until the peers have finished with this rank's tensors.
constexpr std::size_t kZeroCopyBytes = 512;
// An output of at least this many bytes does not stay in the caches anyway, and non-temporal stores
// are up to twice as fast.
constexpr std::size_t kStreamedBytes = 16 << 20;
// Regions of at most so many bytes do not use slots: most of their stores wait in the core's store
// buffer, and take longer to other lines each time. Nor do small calls commit memory for slots.
constexpr std::size_t kUnwaitedBytes = 2 << 10;
// Alignment of regions and chunks: a cache line, so that no SIMD vector is split between chunks.
constexpr std::size_t kLine = 64;

std::size_t ceil_div(std::size_t n, std::size_t by) { return (n + by - 1) / by; }

bool is_even(std::span<const std::size_t> blocks) {
  return std::adjacent_find(blocks.begin(), blocks.end(), std::not_equal_to<>()) == blocks.end();
}

// Most have one block or none: a call of memcmp takes longer.
[[gnu::always_inline]] inline bool are_equal(const Sizes& one, std::span<const std::size_t> other) {
  if (one.size() != other.size()) return false;
  for (std::size_t i = 0; i < one.size(); ++i)
    if (one[i] != other[i]) return false;
  return true;
}

std::size_t elements(const CallBuffer& buffer) {
  std::size_t all = 0;
  for (const BufferSpan& s : buffer.spans) all += s.count;
  return all;
}

// Throws std::invalid_argument if staging buffers of `buffer_bytes` are too small.
std::size_t region_bytes(std::size_t buffer_bytes, const RankProgram& program) {
  const std::size_t n = std::max(program.regions, 1);
  if (n == 1 && buffer_bytes >= kLine) return buffer_bytes / kLine * kLine;
  require(buffer_bytes / n >= kLine, "staging buffers of ", buffer_bytes,
          " bytes are too small for ", n, " chunks; set buffer_bytes to at least ", n * kLine);
  return buffer_bytes / n / kLine * kLine;
}

// The call buffers of one rank's request: their checks, and their division into chunks.
class CallBuffers {
 public:
  CallBuffers(const CollectiveRequest& request, RankAndWorld me)
      : request_(request),
        me_(me),
        item_(item_bytes(request.dtype)),
        input_(input_of(request.collective, request.in_place)),
        output_(output_of(request.collective, request.in_place)) {
    check();
  }

  // Number of elements of all ranks' blocks; 0 if this rank cannot compute it (irregular).
  std::size_t elements() const {
    if (request_.irregular) return 0;
    const bool own = content(known()) == BlockContent::own_block;
    return total(known()) * (own ? me_.world : 1);
  }
  void cut_into_chunks(int chunks);
  std::size_t largest() const { return std::max(offsets_[0].largest(), second().largest()); }
  std::size_t size(const Instruction& i) const { return offsets_of(i.sized_by).size(i.chunk); }
  // Index of the element of the rank's buffer at which the operand's chunk begins.
  std::size_t begin(const Operand& o) const {
    const ChunkOffsets& offsets = offsets_of(o.where);
    const bool own =
        (o.where == OperandBuffer::input ? input_ : output_) == BlockContent::own_block;
    return offsets.begin(o.index) - (own ? offsets.begin(o.rank * per_block_) : 0);
  }

 private:
  const ChunkOffsets& second() const { return offsets_[request_.irregular ? 1 : 0]; }
  const ChunkOffsets& offsets_of(OperandBuffer where) const {
    return where == OperandBuffer::output ? second() : offsets_[0];
  }
  BlockContent content(const CallBuffer& b) const {
    return &b == &request_.input ? input_ : output_;
  }
  void check() const;
  void check(const char* what, const CallBuffer& buffer, BlockContent holds) const;
  std::size_t block(const CallBuffer& buffer, BlockContent holds, std::size_t i) const;
  const CallBuffer& known() const;

  const CollectiveRequest& request_;
  const RankAndWorld me_;
  const std::size_t item_;
  const BlockContent input_, output_;
  int per_block_ = 1;
  std::array<ChunkOffsets, 2> offsets_;  // irregular: input's and output's; else one for both
};

// Returns the buffer that determines most of the other ranks' block sizes.
const CallBuffer& CallBuffers::known() const {
  const CallBuffer &in = request_.input, &out = request_.output;
  if (request_.in_place || out.blocks.empty()) return in;
  return in.blocks.empty() || input_ == BlockContent::own_block ? out : in;
}

std::size_t CallBuffers::block(const CallBuffer& buffer, BlockContent holds, std::size_t i) const {
  if (holds != BlockContent::own_block) return buffer.blocks.empty() ? 0 : buffer.blocks[i];
  return request_.irregular && static_cast<Rank>(i) != me_.rank ? 0 : total(buffer);
}

void CallBuffers::cut_into_chunks(int chunks) {
  const int world = me_.world;
  const bool blocks = input_ != BlockContent::nothing_in_blocks;
  require(!blocks || chunks == world || chunks % world == 0, "a plan of ", chunks,
          " chunks cannot be divided into blocks for ", world, " ranks");
  per_block_ = !blocks ? chunks : chunks == world ? 1 : chunks / world;
  const std::size_t n = blocks ? world : 1, align = kLine / item_;
  const auto bind = [&](ChunkOffsets& offsets, const CallBuffer& buffer, BlockContent holds) {
    offsets.bind(chunks, n, align, [&](std::size_t i) { return block(buffer, holds, i); });
  };
  if (!request_.irregular) return bind(offsets_[0], known(), content(known()));
  bind(offsets_[0], request_.input, input_);
  bind(offsets_[1], request_.in_place ? request_.input : request_.output, output_);
}

void CallBuffers::check(const char* what, const CallBuffer& buffer, BlockContent holds) const {
  if (buffer.blocks.empty()) return require(buffer.spans.empty(), what, " has no block sizes");
  require(ipc::elements(buffer) == total(buffer), what, " has ", ipc::elements(buffer),
          " elements, but its blocks have ", total(buffer));
  const std::size_t n = buffer.blocks.size(), world = me_.world;
  require(holds == BlockContent::own_block || n == (holds == BlockContent::all_blocks ? world : 1),
          what, " has ", n, " blocks; ", name(request_.collective), " of ", world, " ranks needs ",
          holds == BlockContent::all_blocks ? world : 1);
}

void CallBuffers::check() const {
  const CallBuffer &in = request_.input, &out = request_.output;
  check("the input", in, input_);
  require(!request_.in_place || out.blocks.empty() || total(in) == total(out),
          "in place, the output must have as many elements as the input");
  if (request_.in_place) return;
  check("the output", out, output_);
  if (request_.irregular) return;
  const Collective c = request_.collective;
  const bool needs_even =
      c == Collective::all_to_all || c == Collective::gather || c == Collective::scatter;
  require(!needs_even || (is_even(in.blocks) || input_ == BlockContent::own_block), name(c),
          " with input blocks of different sizes must be called as irregular");
  require(!needs_even || (is_even(out.blocks) || output_ == BlockContent::own_block), name(c),
          " with output blocks of different sizes must be called as irregular");
  if (in.blocks.empty() || out.blocks.empty()) return;
  const CallBuffer& whole = known();
  const auto wanted = [&](BlockContent holds) {
    return holds == BlockContent::own_block ? whole.blocks[me_.rank] : total(whole);
  };
  require(total(in) == wanted(input_), "the input has ", total(in), " elements; it must have ",
          wanted(input_));
  require(total(out) == wanted(output_), "the output has ", total(out), " elements; it must have ",
          wanted(output_));
}

// Binds programs to the sizes of one request.
struct ProgramBinder {
  CallBuffers& buffers;
  const PreparedRequest& prepared;
  const std::size_t buffer_bytes;
  const Rank me;

  OperandPlace place(std::size_t stride, const Operand& o) const {
    const auto item = static_cast<uint32_t>(prepared.item());
    const uint32_t base = OperandPlace::of_rank(o.rank, o.where);
    if (o.where == OperandBuffer::staging) return {base, item, o.index * stride};
    const bool output = o.where == OperandBuffer::output && !prepared.request.in_place;
    const uint32_t own = output ? OperandPlace::kOutput : OperandPlace::kInput;
    return {o.rank == me ? own : base, item, buffers.begin(o) * item};
  }

  // If irregular, ranks do not know each other's sizes, and a piece fills the smallest region;
  // otherwise all pieces have about the same size.
  // `may_use_entry`: the entry has no registered offsets, which take the same place.
  BoundProgram bind(const RankProgram& program, bool uses_regions, bool irregular,
                    bool may_use_entry) const {
    buffers.cut_into_chunks(program.chunks);
    const std::size_t least = buffers.largest() * prepared.item();
    std::size_t stride = region_bytes(buffer_bytes, program);
    BoundProgram bound{.program = program, .largest = buffers.largest()};
    bound.in_entry = may_use_entry && program.fills_at_entry && !irregular &&
                     program.regions * least <= CallEntry::kDataBytes;
    if (bound.in_entry)
      stride = least;
    else if (uses_regions && !irregular)
      stride = divide_in_slots(bound, least, stride);
    if (uses_regions && !bound.in_entry) bound.stride = stride;
    for (const Instruction& instruction : program.instructions) {
      bound.counts.push_back(buffers.size(instruction));
      for (const Operand& o : instruction.operands) bound.places.push_back(place(stride, o));
    }
    if (bound.stride > 0) cut(bound, irregular);
    return bound;
  }

  // Divides the staging buffers into slots, if two or more fit. Returns the stride of regions,
  // which are then no larger than `least` bytes need.
  std::size_t divide_in_slots(BoundProgram& bound, std::size_t least, std::size_t stride) const {
    const std::size_t region = ceil_div(least, kLine) * kLine;
    if (region <= kUnwaitedBytes) return stride;
    const std::size_t slot = region * bound.program.regions;
    const std::size_t slots = SegmentLayout::slots_bytes(buffer_bytes) / slot;
    if (slots < 2) return stride;
    bound.slots = slots;
    bound.slot_bytes = slot;
    return region;
  }

  // Cuts the data into pieces that fit into the regions.
  void cut(BoundProgram& bound, bool irregular) const {
    const std::size_t most = bound.stride / prepared.item();
    bound.pieces.elements = most;
    if (bound.largest > most)
      bound.pieces =
          common_pieces(bound, {static_cast<uint32_t>(ceil_div(bound.largest, most)), most},
                        prepared.item(), irregular);
  }
};

// A copy of the request that refers to nothing of the caller's.
CollectiveRequest without_data(const CollectiveRequest& request, std::string_view algorithm,
                               const Sizes& input_blocks, const Sizes& output_blocks) {
  CollectiveRequest sizes = request;
  sizes.algorithm = algorithm;
  sizes.input = {{}, input_blocks, request.input.cuts};
  sizes.output = {{}, output_blocks, request.output.cuts};
  sizes.sparse = nullptr;
  return sizes;
}

FoldOptions fold_options(const CollectiveRequest& request, int world) {
  FoldOptions options = request.options;
  options.world = world;
  return options;
}

// What a request is besides its root, sizes and data, in one word.
uint64_t properties_of(const CollectiveRequest& r) {
  return static_cast<uint64_t>(r.collective) | static_cast<uint64_t>(r.dtype) << 8 |
         uint64_t{r.moved_dtype} << 16 | static_cast<uint64_t>(r.op) << 24 |
         uint64_t{r.in_place} << 32 | uint64_t{r.irregular} << 33 |
         uint64_t{r.options.non_temporal} << 34 | uint64_t{r.sparse != nullptr} << 35 |
         static_cast<uint64_t>(r.options.order) << 36;
}

}  // namespace

Pieces common_pieces(const BoundProgram& bound, Pieces of_all, std::size_t item, bool irregular) {
  Pieces common = bound.pieces;
  if (irregular) {
    common.elements = std::min(common.elements, of_all.elements);
  } else if (of_all.count > common.count) {
    const std::size_t per_line = kLine / item;
    common.elements = ceil_div(ceil_div(bound.largest, of_all.count), per_line) * per_line;
  }
  common.count = std::max(common.count, of_all.count);
  return common;
}

PreparedRequest::PreparedRequest(const CollectiveRequest& r, RankPrograms& programs,
                                 const PreparationSettings& settings)
    : algorithm_(r.algorithm),
      input_blocks_(r.input.blocks.begin(), r.input.blocks.end()),
      output_blocks_(r.output.blocks.begin(), r.output.blocks.end()),
      request(without_data(r, algorithm_, input_blocks_, output_blocks_)),
      row(r.dtype, r.op, fold_options(r, programs.me().world)),
      common(common_fingerprint(r)),
      input_elements_(total(r.input)),
      output_elements_(total(r.output)),
      properties_(properties_of(r)) {
  const RankAndWorld me = programs.me();
  CallBuffers buffers(r, me);
  bytes = buffers.elements() * item();
  non_temporal =
      r.options.non_temporal && !r.in_place && total(r.output) * item() >= kStreamedBytes;
  const ProgramBinder binder{buffers, *this, settings.buffer_bytes, me.rank};
  const auto program = [&](Topology topology) -> const RankProgram& {
    const SelectionKey key{.collective = r.collective,
                           .world = me.world,
                           .bytes = bytes,
                           .dtype = r.dtype,
                           .in_place = r.in_place,
                           .topology = topology,
                           .order = r.options.order};
    const Choice choice = choose(key, r.algorithm);
    return programs.find(
        {choice.algorithm, choice.pieces, r.root, r.in_place, topology == Topology::shm_symmetric});
  };
  const RankProgram& staged = program(Topology::shm_buffers);
  require(!r.irregular || staged.sizes_known, name(r.collective), ": algorithm '", r.algorithm,
          "' needs blocks of equal size; choose another algorithm");
  const bool zero_copy = settings.has_symmetric_heap && bytes >= kZeroCopyBytes * me.world;
  in_buffers.emplace(binder.bind(staged, staged.stages(), r.irregular, !zero_copy));
  common.fingerprint.pieces = in_buffers->pieces.count;
  chooses_stores = in_buffers->largest * item() >= StoreChoice::kLeastBytes;
  if (!zero_copy) return;
  const RankProgram& direct = program(Topology::shm_symmetric);
  in_tensors.emplace(binder.bind(direct, direct.stages(), false, false));
}

void check_request(const CollectiveRequest& r, RankAndWorld me) {
  const CallBuffers checked(r, me);
  const cpu::RowRunner defined(r.dtype, r.op, r.options);
}

// Float8Specials are the same in all requests of a process.
inline bool PreparedRequest::serves(const CollectiveRequest& r, uint64_t properties) const {
  return properties_ == properties && request.root == r.root && request.tensors == r.tensors &&
         r.sparse == nullptr && request.algorithm == r.algorithm &&
         request.input.cuts == r.input.cuts && request.output.cuts == r.output.cuts &&
         are_equal(input_blocks_, r.input.blocks) && are_equal(output_blocks_, r.output.blocks) &&
         elements(r.input) == input_elements_ && elements(r.output) == output_elements_;
}

const PreparedRequest& RequestCache::find(const CollectiveRequest& r) {
  const auto blocks = r.input.blocks.empty() ? r.output.blocks : r.input.blocks;
  const uint64_t properties = properties_of(r);
  Hasher h;
  h.add(blocks.empty() ? 0 : blocks.front());
  h.add(properties ^ static_cast<uint64_t>(r.root) << 48);
  std::unique_ptr<const PreparedRequest>& place = places_[h.value() % kPlaces];
  if (place == nullptr || !place->serves(r, properties)) [[unlikely]]
    place = std::make_unique<const PreparedRequest>(r, programs_, settings_);
  return *place;
}

}  // namespace pycollect::ipc
