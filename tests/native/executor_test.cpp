// The executor between ranks that are threads or forked processes: random calls, whose results are,
// bit for bit, those of the same plan run by one thread in the written order (every rank generates
// all of it from a seed), and a root that is late. Usage: executor_test [cases] [worlds...]
#include "../../csrc/rank_executor/executor.h"

#include <array>
#include <numeric>
#include <random>

#include "../../csrc/cpu/executor.h"
#include "../../csrc/plan/passes.h"
#include "../../csrc/plan/registry.h"
#include "ranks.h"

namespace pycollect::ipc {
namespace {

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

Case random_case(int world, uint64_t seed) {
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
void fill(Bytes& bytes, DType t, uint64_t seed) {
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
Blocks blocks(const Case& c, Rank r, bool output) {
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

Bytes initial(const Case& c, Rank r, bool output) {
  const Sizes full = blocks(c, r, output).full;
  Bytes content(std::reduce(full.begin(), full.end()) * item_bytes(c.dtype), std::byte{0x5a});
  if (!output) fill(content, c.dtype, c.seed * 1000 + r);
  return content;
}

// Expected contents of every rank's buffers after the call.
struct Outcome {
  std::vector<Bytes> in, out;  // in place: both are the input buffers
};
Outcome expected(const Case& c, const std::string& algorithm) {
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

Deadline soon() { return Clock::now() + 60s; }

constexpr std::size_t kArena = 4 << 20;

// One rank, its number of calls, and its executor.
struct Member {
  Group& group;
  uint64_t call = 0;
  RankExecutor executor{group, [](int64_t size, int64_t grain, const cpu::Body& body) {
                          for (int64_t at = 0; at < size; at += grain)
                            body(at, std::min(size, at + grain));
                        }};
  void run(const CollectiveRequest& request) { executor.run(request, call++, soon()); }
};

// Memory of one call buffer: spread over tensors that are not adjacent, or in the symmetric heap.
class TestBuffer {
 public:
  TestBuffer(Group& group, const Case& c, bool output) : item_(item_bytes(c.dtype)) {
    const Bytes content = initial(c, group.rank(), output);
    buffer_.blocks = blocks(c, group.rank(), output).own;
    const std::size_t n = content.size() / item_;
    for (int i = 0; i < c.tensors && !buffer_.blocks.empty(); ++i) {
      const std::size_t begin = n * i / c.tensors, end = n * (i + 1) / c.tensors;
      std::byte* at = group.heap(group.rank()) + (output ? kArena / 2 : 0) + begin * item_;
      if (!c.zero_copy) {
        parts_.emplace_back((end - begin) * item_ + 1);  // gives an empty tensor an address
        at = parts_.back().data();
      }
      std::copy_n(content.begin() + begin * item_, (end - begin) * item_, at);
      buffer_.spans.push_back({at, end - begin});
    }
  }
  CallBuffer buffer() const { return buffer_.view(); }
  CallBufferMemory& memory() { return buffer_; }
  bool holds(const Bytes& wanted) const {
    const std::byte* at = wanted.data();
    return std::ranges::all_of(buffer_.spans, [&](const BufferSpan& s) {
      return std::equal(s.base, s.base + s.count * item_, std::exchange(at, at + s.count * item_));
    });
  }

 private:
  std::size_t item_;
  std::vector<Bytes> parts_;
  CallBufferMemory buffer_;
};

// A random plan: any list of steps is one. All slices of a step are the same chunks of different
// ranks. Scratch is written before it is read, because staging buffers still hold data of earlier
// calls.
Plan random_plan(int world, uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Plan plan{world, 1 + below(4)};
  std::vector<bool> written(cells(plan));
  const auto side = [&](int first, int count, bool reads) {
    Slices slices;
    std::vector<Rank> ranks(world);
    for (Rank r = 0; r < world; ++r) ranks[r] = r;
    std::shuffle(ranks.begin(), ranks.end(), random);
    ranks.resize(1 + below(world));
    for (Rank r : ranks) {
      Slice s{r, static_cast<Buffer>(below(3)), first, count};
      bool ready = true;
      if (s.buffer == Buffer::scratch)
        each_cell(plan, false, s, [&](int c) { ready &= written[c]; });
      if (reads && !ready) s.buffer = Buffer::input;
      slices.push_back(s);
    }
    return slices;
  };
  for (int steps = 1 + below(20); steps > 0; --steps) {
    const int count = 1 + below(plan.chunks), first = below(plan.chunks - count + 1);
    Slices srcs = side(first, count, true), dsts = side(first, count, false);
    for (const Slice& d : dsts) each_cell(plan, false, d, [&](int c) { written[c] = true; });
    plan.fold(dsts, srcs, below(2) == 0 ? Step::kFirstDestination : below(world));
  }
  return plan;
}

// Returns false if the plan is invalid in place or needs more host memory than one rank has.
bool suits_processes(const Plan& plan, bool in_place, bool zero_copy) {
  try {
    check(plan, in_place);
    for_processes(plan, in_place, zero_copy, zero_copy);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

// Random plans, registered in this program as the all_reduce algorithms random_plan0 and so on.
template <int kSeed>
Plan seeded_plan(const AlgorithmParams& params) {
  return random_plan(params.world, kSeed);
}
template <int... kSeed>
std::vector<RegisterAlgorithm> register_random_plans(std::integer_sequence<int, kSeed...>) {
  static const std::array names{text("random_plan", kSeed)...};
  return {RegisterAlgorithm({.name = names[kSeed].c_str(),
                             .collective = Collective::all_reduce,
                             .make = seeded_plan<kSeed>,
                             .cost = "",
                             .order = Order::other})...};
}
const std::vector<RegisterAlgorithm> kRandomPlans =
    register_random_plans(std::make_integer_sequence<int, 60>());

// Returns true if a case can run. A random plan may be invalid in place or for processes, and where
// nothing is summed up, the step at which `avg` scales is undefined.
bool is_possible(const Case& c) {
  if (!c.algorithm.starts_with("random_plan")) return true;
  const Plan plan = find(c.collective, c.algorithm)({c.world, 0, 4});
  return c.op != ReduceOp::avg && suits_processes(plan, c.in_place, false) &&
         suits_processes(plan, c.in_place, true);
}

// Puts the buffer of one block inside the other buffer, as torch's callers do, where possible.
bool place_within(TestBuffer& in, TestBuffer& out, const CollectiveRequest& request, Rank r,
                  const Bytes& input) {
  const bool is_out = output_of(request.collective, false) == BlockContent::own_block;
  CallBufferMemory &own = (is_out ? out : in).memory(), &all = (is_out ? in : out).memory();
  if (own.blocks.size() != 1 || all.blocks.size() < 2) return false;
  std::byte*& base = own.spans[0].base;
  base = all.spans[0].base;
  for (Rank before = 0; before < r; ++before)
    base += all.blocks[before] * item_bytes(request.dtype);
  if (!is_out) std::copy(input.begin(), input.end(), base);
  return true;
}

void run_case(Member& me, const Case& c) {
  const Rank r = me.group.rank();
  TestBuffer in(me.group, c, false), out(me.group, c, true);
  CollectiveRequest request{.collective = c.collective,
                            .dtype = c.dtype,
                            .op = c.op,
                            .root = c.root,
                            .algorithm = c.algorithm,
                            .in_place = c.in_place,
                            .input = in.buffer(),
                            .output = c.in_place ? CallBuffer{} : out.buffer(),
                            .irregular = c.irregular,
                            .tensors = static_cast<uint64_t>(c.tensors)};
  const bool within = c.within && place_within(in, out, request, r, initial(c, r, false));
  me.run(request);
  // Any algorithm that keeps the contract has the same result, bit for bit, as the selector's.
  const Outcome want = expected(c, !c.algorithm.empty()                     ? c.algorithm
                                   : c.collective == Collective::all_reduce ? "leader"
                                                                            : "direct");
  const std::string what = text("rank ", r, " of ", c.world, ": ", c.describe());
  if (within)
    return expect(std::ranges::equal(want.out[r],
                                     std::span(request.output.spans[0].base, want.out[r].size())),
                  what);
  expect(in.holds(want.in[r]), what + ": the input");
  expect(c.in_place || out.holds(want.out[r]), what + ": the output");
}

// Twice each: the second call of a staged request tries non-temporal stores, see StoreChoice.
void run_cases(Member& me, int cases, uint64_t seed) {
  for (int i = 0; i < 2 * cases; ++i)
    if (const Case c = random_case(me.group.world(), seed + i / 2); is_possible(c)) run_case(me, c);
  me.run({.collective = Collective::barrier, .tensors = 0});
}

// A request that differs from an earlier one only in its sparse form is another one, also where an
// executor has prepared the earlier one.
void run_sparse_form(Member& me) {
  std::vector<float> in(100, 1), out(100, -1);
  const auto memory = [](std::vector<float>& at) {
    return CallBufferMemory{{{reinterpret_cast<std::byte*>(at.data()), at.size()}}, {at.size()}};
  };
  const CallBufferMemory from = memory(in), to = memory(out);
  const SparseForm form{DType::f32, ReduceOp::sum, 1000, 7};
  CollectiveRequest request{.collective = Collective::all_reduce,
                            .dtype = DType::f32,
                            .input = from.view(),
                            .output = to.view()};
  request.sparse = &form;
  me.run(request);
  request.sparse = nullptr;
  RankExecutor fresh(me.group, {});
  RankExecutor& executor = me.group.rank() == 0 ? me.executor : fresh;
  executor.run(request, me.call++, soon());
  expect(out[99] == static_cast<float>(me.group.world()), "the sum of a dense call");
}

// Calls in turn of sizes of which one, two or more fit into the staging buffers, or a part of one:
// no call writes what a peer still reads.
void run_in_slots(Member& me) {
  Case c{};
  c.collective = Collective::all_reduce, c.dtype = DType::f32, c.op = ReduceOp::sum;
  c.world = me.group.world(), c.tensors = 1;
  for (uint64_t i = 0; i < 400; ++i) {
    c.seed = i, c.in_place = i % 3 == 0;
    c.sizes = {
        {std::array<std::size_t, 5>{700, 2100, 9000, 90000, 300000}[i % 16 < 12 ? i % 3 : i % 5]}};
    run_case(me, c);
  }
}

// The calls of a StoreChoice that take `cached` or `non_temporal` nanoseconds, or longer: one in
// five is held up, one in seven fails.
struct ChoiceRun {
  StoreChoice choice;
  std::array<int, 2> calls = {};  // of each kind
  void run(int n, int cached, int non_temporal) {
    calls = {};
    for (int i = 0; i < n; ++i) call(i % 7 != 0, (i % 5 == 0 ? 9 : 1), cached, non_temporal);
  }
  void call(bool works, int slower, int cached, int non_temporal) {
    const bool kind = choice.is_non_temporal();
    ++calls[kind];
    if (works && choice.is_trial())
      choice.measured(kind, std::chrono::nanoseconds(slower * (kind ? non_temporal : cached)));
    choice.next();
  }
};

void run_store_choice() {
  ChoiceRun it;
  it.run(1024, 100, 200);
  expect(it.calls[true] == 5 * 3, text(it.calls[true], " calls with the slower stores"));
  it.run(512, 200, 100);  // the ranks have changed cores
  it.run(512, 200, 100);
  expect(it.calls[false] == 3, text(it.calls[false], " calls with stores that became slower"));
  it.run(512, 100, 95);  // hardly faster
  it.run(512, 100, 95);
  expect(it.calls[true] == 3, text(it.calls[true], " calls with stores that are hardly faster"));
  // Every second call, or the rest, is one that this rank does not measure, or is slow by itself.
  for (const int other : {0, 1})
    for (const bool measured : {false, true}) {
      ChoiceRun turns;
      for (int i = 0; i < 1000; ++i)
        turns.call(measured || i % 2 != other, i % 2 == other ? 3 : 1, 100, 200);
      expect(turns.calls[true] == 5 * 3, text(turns.calls[true], " calls in turn with others"));
    }
  for (const bool kind : {false, true}) {
    ChoiceRun one_kind;
    for (int i = 0; i < 1000; ++i)
      one_kind.call(one_kind.choice.is_non_temporal() == kind, 1, 100, 50);
    expect(one_kind.calls[true] == 5 * 3, "chose stores that no trial compared with others");
  }
}

GroupSettings settings_of(std::size_t buffer_bytes, std::size_t heap_bytes) {
  GroupSettings settings = quick_settings(60s);
  settings.buffer_bytes = buffer_bytes, settings.symmetric_heap_bytes = heap_bytes;
  return settings;
}

Body with_member(const std::function<void(Member&)>& body) {
  return [=](RankContext& it) {
    Group group(it.store, it.rank, it.world, it.settings);
    group.segment()->commit(group.layout().heap(it.rank), kArena);
    Member me{group};
    body(me);
    return std::string("right");
  };
}

// Broadcasts by an algorithm whose plan a rank's thread can hold up.
thread_local std::function<void()> while_planning;
const RegisterAlgorithm kHeldUp({.name = "held_up",
                                 .collective = Collective::broadcast,
                                 .make =
                                     [](const AlgorithmParams& params) {
                                       if (while_planning) while_planning();
                                       return find(Collective::broadcast, "direct")(params);
                                     },
                                 .cost = ""});

// Rank 1 gives up before the root, which only fills its own staging buffer, enters the call.
void run_late_root() {
  std::atomic<bool> gave_up{false};
  const auto ends = run_threads(2, settings_of(4096, kArena), [&](RankContext& me) {
    Group group(me.store, me.rank, 2, me.settings);
    std::vector<std::byte> ones(64);
    const CallBufferMemory memory{{{ones.data(), ones.size()}}, {ones.size()}};
    if (me.rank == 0) while_planning = [&] { gave_up.wait(false); };
    const Deadline deadline = me.rank == 0 ? soon() : Clock::now() + 50ms;
    const std::string error = refusal([&] {
      RankExecutor(group, {}).run({.collective = Collective::broadcast,
                                   .dtype = DType::u8,
                                   .algorithm = "held_up",
                                   .in_place = true,
                                   .input = memory.view()},
                                  0, deadline);
    });
    gave_up = true;
    gave_up.notify_all();
    return error;
  });
  expect_each_part(ends, "rank 0 did not arrive");
}

}  // namespace

void test(int cases, const std::vector<int>& worlds) {
  run_store_choice();
  run_late_root();
  for (const int world : worlds) {
    // Staging buffers so small that most calls take several pieces, and of the usual size.
    for (const std::size_t buffer_bytes :
         {std::max<std::size_t>(192 * world, 512), std::size_t{4096}, std::size_t{512} << 10}) {
      const uint64_t seed = buffer_bytes + 100000 * world;
      const Body calls = with_member([=](Member& me) { run_cases(me, cases, seed); });
      const GroupSettings settings = settings_of(buffer_bytes, kArena);
      if (forks()) expect_each(run(world, settings, calls), "right");
      expect_each(run_threads(world, settings, calls), "right");
    }
    if (world == 2 || world == 3)
      for (void (*const body)(Member&) : {run_sparse_form, run_in_slots})
        expect_each(run_threads(world, settings_of(512 << 10, kArena), with_member(body)), "right");
    std::printf("world %d: right\n", world);
    std::fflush(stdout);
  }
}

}  // namespace pycollect::ipc

int main(int argc, char** argv) {
  std::vector<int> worlds;
  for (int i = 2; i < argc; ++i) worlds.push_back(std::atoi(argv[i]));
  if (worlds.empty()) worlds = {1, 2, 3, 4, 5, 8};
  pycollect::ipc::test(argc > 1 ? std::atoi(argv[1]) : 300, worlds);
}
