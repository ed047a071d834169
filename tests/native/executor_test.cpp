// The executor between ranks that are threads or forked processes: its results, bit for bit, its
// refusals, and late ranks. Usage: executor_test [cases per world] [worlds...]
#include "../../csrc/rank_executor/executor.h"

#include <array>

#include "cases.h"
#include "random_plans.h"

namespace pycollect::ipc {
namespace {

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
  return c.op != ReduceOp::avg && plan_for_processes(plan, c.in_place, false, false) &&
         plan_for_processes(plan, c.in_place, true, true);
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

// A request on ones, whose output is full of -1.
struct FloatRequest {
  static constexpr std::size_t kMost = 6000;
  std::vector<float> in = std::vector<float>(kMost, 1), out = std::vector<float>(kMost, -1);
  CallBufferMemory in_memory, out_memory;
  CollectiveRequest request;
  FloatRequest(const Sizes& sent, const Sizes& received)
      : in_memory(memory(in, sent)),
        out_memory(memory(out, received)),
        request{.collective = Collective::all_reduce,
                .dtype = DType::f32,
                .input = in_memory.view(),
                .output = out_memory.view()} {}
  FloatRequest(const FloatRequest&) = delete;
  FloatRequest& operator=(const FloatRequest&) = delete;
  static CallBufferMemory memory(std::vector<float>& at, const Sizes& blocks) {
    const std::size_t count = std::reduce(blocks.begin(), blocks.end());
    return {{{reinterpret_cast<std::byte*>(at.data()), count}}, blocks};
  }
};

// Every rank's message contains `part`, no output is written, and the group stays usable.
void expect_refused(Member& me, const FloatRequest& it, const std::string& part,
                    std::size_t count) {
  const std::string message = refusal([&] { me.run(it.request); });
  expect_part(message, "invalid_argument: ");
  expect_part(message, part);
  expect(it.out == std::vector<float>(it.kMost, -1), "an output was written before all agreed");
  FloatRequest after({count}, {count});
  me.run(after.request);
  std::vector<float> sums(it.kMost, -1);
  std::fill_n(sums.begin(), count, static_cast<float>(me.group.world()));
  expect(after.out == sums, "the group does not work after: " + part);
}

// The last rank's call differs; tests/test_dist_disagreements.py has more differences.
void run_differences(Member& me, std::size_t count) {
  const int world = me.group.world();
  const Rank r = me.group.rank();
  static const Sizes kSeven{7};
  const std::pair<const char*, void (*)(CollectiveRequest&)> differences[] = {
      {"with different algorithms", [](CollectiveRequest& it) { it.algorithm = "chain"; }},
      {"in 7 tensors, rank 0 called", [](CollectiveRequest& it) { it.tensors = 7; }},
      {"bor is not defined for float32", [](CollectiveRequest& it) { it.op = ReduceOp::bor; }},
      {"but its blocks have 7", [](CollectiveRequest& it) { it.output.blocks = kSeven; }}};
  for (const auto& [part, change] : differences) {
    FloatRequest it({count}, {count});
    if (r == world - 1) change(it.request);
    expect_refused(me, it, part, count);
  }
  Sizes sent(world, 3), received(world, 3), uneven(world, 5);
  if (r == 1) received[0] = 4, uneven[1] = 4, uneven[0] = 6;
  FloatRequest exchanged(sent, received), reduced(uneven, {uneven[r]});
  exchanged.request.collective = Collective::all_to_all, exchanged.request.irregular = true;
  reduced.request.collective = Collective::reduce_scatter;
  expect_refused(me, exchanged, "rank 0 sends 3 elements to rank 1, which has room for 4", count);
  expect_refused(me, reduced, "tensors of different sizes", count);
}

// A request that differs from an earlier one only in its sparse form is another one, also where an
// executor has prepared the earlier one.
void run_sparse_form(Member& me) {
  FloatRequest it({100}, {100});
  const SparseForm form{DType::f32, ReduceOp::sum, 1000, 7};
  it.request.sparse = &form;
  me.run(it.request);
  it.request.sparse = nullptr;
  RankExecutor fresh(me.group, {});
  RankExecutor& executor = me.group.rank() == 0 ? me.executor : fresh;
  executor.run(it.request, me.call++, soon());
  expect(it.out[99] == static_cast<float>(me.group.world()), "the sum of a dense call");
}

void run_refusals(Member& me) {
  run_sparse_form(me);
  for (const std::size_t count : {100, 6000, 100}) run_differences(me, count);
  run_cases(me, 20, 7);
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

// Runs two ranks that are threads, with a call on their tensors of `count` ones in the heap.
std::vector<RankExit> run_in_heap(
    std::size_t count, const std::function<void(Group&, const CollectiveRequest&)>& body) {
  return run_threads(2, settings_of(4096, 64 << 20), [&](RankContext& me) {
    Group group(me.store, me.rank, 2, me.settings);
    group.segment()->commit(group.layout().heap(me.rank), count * sizeof(float));
    std::fill_n(reinterpret_cast<float*>(group.heap(me.rank)), count, 1.0F);
    const CallBufferMemory memory{{{group.heap(me.rank), count}}, {count}};
    body(group, {.collective = Collective::all_reduce,
                 .dtype = DType::f32,
                 .in_place = true,
                 .input = memory.view()});
    return std::string("nothing");
  });
}

// Rank 1 aborts the group when it has written a sixteenth of its share: it stops and throws.
void run_late_writer() {
  constexpr std::size_t kCount = 8 << 20;
  std::size_t changed = 0;
  const auto ends = run_in_heap(kCount, [&](Group& group, const CollectiveRequest& request) {
    const cpu::ParallelFor late = [&](int64_t size, int64_t, const cpu::Body& body) {
      body(0, size / 16);
      if (group.rank() == 1) group.abort("the peers have given up");
      body(size / 16, size);
      const auto* other = reinterpret_cast<const float*>(group.heap(0)) + kCount / 2;
      changed = std::count_if(other, other + kCount / 2, [](float x) { return x != 1; });
    };
    RankExecutor(group, group.rank() == 1 ? late : cpu::ParallelFor()).run(request, 0, soon());
  });
  expect_each_part(ends, "the peers have given up");
  expect(0 < changed && changed <= kCount / 32, text(changed, " elements were written"));
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
  const auto ends = run_in_heap(16, [&](Group& group, CollectiveRequest request) {
    request.collective = Collective::broadcast;
    request.algorithm = "held_up";
    if (group.rank() == 0) while_planning = [&] { gave_up.wait(false); };
    const Deadline deadline =
        group.rank() == 0 ? soon() : Clock::now() + std::chrono::milliseconds(50);
    const std::string error = refusal([&] { RankExecutor(group, {}).run(request, 0, deadline); });
    gave_up = true;
    gave_up.notify_all();
    throw Timeout(error);
  });
  expect_each_part(ends, "rank 0 did not arrive");
}

// Rank 1 publishes a registered offset far beyond its symmetric heap.
void run_impossible_offset() {
  const auto ends = run_in_heap(1 << 20, [](Group& group, const CollectiveRequest& request) {
    if (group.rank() == 0) return RankExecutor(group, {}).run(request, 0, soon());
    CallFingerprint forged = fingerprint_of(request, 0);
    forged.set_registered(RegisteredOffsets{(64 << 20) - 64, uint64_t{1} << 60});
    enter(group, forged, at_run(1));
    group.await_entry(0, at_run(0) + 1, {"all_reduce", 0, soon()});
  });
  expect_part(ends[0].result, "rank 1 exposed a tensor outside its shared memory");
}

}  // namespace

void test(int cases, const std::vector<int>& worlds) {
  run_store_choice();
  run_late_writer();
  run_late_root();
  run_impossible_offset();
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
    if (world > 1)
      for (const std::size_t buffer_bytes : {4 << 10, 512 << 10})
        expect_each(
            run_threads(world, settings_of(buffer_bytes, kArena), with_member(run_refusals)),
            "right");
    if (world == 2 || world == 3)
      expect_each(run_threads(world, settings_of(512 << 10, kArena), with_member(run_in_slots)),
                  "right");
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
