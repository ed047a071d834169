// The executor between ranks that are threads or forked processes: its results, bit for bit, and
// its refusals. Usage: executor_test [cases per world] [worlds...]
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "../../csrc/plan/passes.h"
#include "cases.h"
#include "random_plans.h"
#include "stores.h"

namespace pycollect::ipc {
namespace {

using namespace std::chrono_literals;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "FAILED: %s\n", why.c_str());
  std::_Exit(1);
}
void expect(bool ok, const std::string& why) {
  if (!ok) fail(why);
}

Deadline soon() { return Clock::now() + 60s; }

constexpr std::size_t kArena = 4 << 20;

// One rank, its number of calls, and its transport.
struct Member {
  Group& group;
  uint64_t call = 0;
  ShmTransport transport{group, [](int64_t size, int64_t grain, const cpu::Body& body) {
                           for (int64_t at = 0; at < size; at += grain)
                             body(at, std::min(size, at + grain));
                         }};
  void run(const CollectiveRequest& request) { ipc::run(transport, request, call++, soon()); }
};

// Memory of one call buffer: spread over tensors that are not adjacent, or in the symmetric heap.
class TestBuffer {
 public:
  TestBuffer(Group& group, const Case& c, const Bytes& content, const Sizes& blocks,
             std::size_t arena_offset)
      : content_(content) {
    if (blocks.empty()) return;
    const std::size_t item = item_bytes(c.dtype), n = content.size() / item;
    buffer_.blocks = blocks;
    if (c.zero_copy) {
      std::byte* at = group.heap(group.rank()) + arena_offset;
      std::copy(content.begin(), content.end(), at);
      buffer_.segments = {{at, n}};
      return;
    }
    for (int i = 0; i < c.tensors; ++i) {
      const std::size_t begin = n * i / c.tensors, end = n * (i + 1) / c.tensors;
      parts_.emplace_back(content.begin() + begin * item, content.begin() + end * item);
      parts_.back().resize((end - begin) * item + 1);  // gives an empty tensor an address
      buffer_.segments.push_back({parts_.back().data(), end - begin});
    }
  }
  const CallBuffer& buffer() const { return buffer_; }
  Bytes now(std::size_t item) const {
    Bytes all;
    for (const BufferSegment& s : buffer_.segments)
      all.insert(all.end(), s.base, s.base + s.count * item);
    return buffer_.blocks.empty() ? content_ : all;
  }

 private:
  Bytes content_;
  std::vector<Bytes> parts_;
  CallBuffer buffer_;
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

// Returns the reference algorithm. If the case names none, any algorithm that keeps the contract
// has the same result, bit for bit, as the selector's choice.
std::string chosen(const Case& c) {
  if (!c.algorithm.empty()) return c.algorithm;
  return c.collective == Collective::all_reduce ? "leader" : "direct";
}

// Returns true if a case can run. A random plan may need more host memory than a rank has or be
// invalid in place, and where nothing is summed up, the step at which `avg` scales is undefined.
bool is_possible(const Case& c, int world) {
  if (!c.algorithm.starts_with("random_plan")) return true;
  if (c.op == ReduceOp::avg) return false;
  try {
    const Plan plan = find(c.collective, c.algorithm)({world, 0, 4});
    check(plan, c.in_place);
    for_processes(plan, c.in_place, false, false);
    for_processes(plan, c.in_place, true, true);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

// Puts the buffer of one block inside the other buffer, as torch's callers do, where possible.
bool place_within(CollectiveRequest& request, Rank r, const Bytes& input) {
  const bool out = output_of(request.collective, false) == BlockContent::own_block;
  CallBuffer &own = out ? request.output : request.input,
             &all = out ? request.input : request.output;
  if (own.blocks.size() != 1 || all.blocks.size() < 2) return false;
  std::byte*& base = own.segments[0].base;
  base = all.segments[0].base;
  for (Rank before = 0; before < r; ++before)
    base += all.blocks[before] * item_bytes(request.dtype);
  if (!out) std::copy(input.begin(), input.end(), base);
  return true;
}

void run_case(Member& me, const Case& c) {
  const int world = me.group.world();
  const Rank r = me.group.rank();
  const std::size_t item = item_bytes(c.dtype);
  const Blocks b = blocks(c, r, world);
  const Bytes input = make_input(c, r, world);
  TestBuffer in(me.group, c, input, b.in, 0),
      out(me.group, c, initial_output(c, r, world), b.out, kArena / 2);
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
  const bool within = c.within && place_within(request, r, input);
  me.run(request);
  const Outcome want = expected(c, chosen(c), world);
  const auto description = [&] { return text("rank ", r, " of ", world, ": ", c.describe()); };
  const auto holds = [&](const CallBuffer& buffer, const Bytes& bytes) {
    return std::equal(bytes.begin(), bytes.end(), buffer.segments[0].base);
  };
  if (within) return expect(holds(request.output, want.out[r]), description());
  expect(in.now(item) == want.in[r], description() + ": the input");
  if (!c.in_place && !b.out.empty())
    expect(out.now(item) == want.out[r], description() + ": the output");
}

void run_cases(Member& me, int cases, uint64_t seed) {
  const int world = me.group.world();
  for (int i = 0; i < cases; ++i)
    if (const Case c = Picker(world, seed + i).pick(); is_possible(c, world)) run_case(me, c);
  me.run({.collective = Collective::barrier, .tensors = 0});
}

#include "refusals.h"

GroupSettings settings(std::size_t buffer_bytes, std::shared_ptr<Segment> segment) {
  GroupSettings s;
  s.buffer_bytes = buffer_bytes;
  s.symmetric_heap_bytes = kArena;
  s.timeout = 60s;
  s.segment = std::move(segment);
  return s;
}

void commit_arena(Group& group) {
  group.segment()->commit(group.layout().heap(group.rank()), kArena);
}

std::size_t total_bytes(int world, std::size_t buffer_bytes) {
  return SegmentLayout({world, buffer_bytes, 0, kArena}).total;
}

template <class F>
void with_threads(int world, std::size_t buffer_bytes, F&& f) {
  MapStore store;
  auto segment = Segment::create(total_bytes(world, buffer_bytes));
  std::vector<std::thread> ranks;
  for (Rank r = 0; r < world; ++r)
    ranks.emplace_back([&, r] {
      try {
        Group group(store, r, world, settings(buffer_bytes, segment));
        commit_arena(group);
        Member me{group};
        f(me);
      } catch (const std::exception& error) {
        fail(text("rank ", r, " of ", world, ": ", error.what()));
      }
    });
  for (std::thread& t : ranks) t.join();
}

template <class F>
void with_processes(int world, std::size_t buffer_bytes, F&& f) {
  const auto folder = std::filesystem::temp_directory_path() / text("executor_test.", getpid());
  std::vector<pid_t> ranks;
  for (Rank r = 0; r < world; ++r) {
    ranks.push_back(fork());
    if (ranks.back() != 0) continue;
    try {
      FileStore store(folder);
      Group group(store, r, world, settings(buffer_bytes, nullptr));
      commit_arena(group);
      Member me{group};
      f(me);
    } catch (const std::exception& error) {
      fail(text("process ", r, " of ", world, ": ", error.what()));
    }
    std::_Exit(0);
  }
  bool all = true;
  for (const pid_t rank : ranks) {
    int status = 1;
    waitpid(rank, &status, 0);
    all &= status == 0;
  }
  std::filesystem::remove_all(folder);
  if (!all) std::_Exit(1);
}

#include "late_writes.h"

}  // namespace

void test(int cases, const std::vector<int>& worlds, bool forks) {
  run_late_writer();
  run_impossible_offset();
  for (const int world : worlds) {
    // Staging buffers so small that most calls take several pieces, and of the usual size.
    for (const std::size_t buffer_bytes :
         {std::max<std::size_t>(192 * world, 512), std::size_t{4096}, std::size_t{512} << 10}) {
      const uint64_t seed = buffer_bytes + 100000 * world;
      const auto calls = [&](Member& me) { run_cases(me, cases, seed); };
      if (forks) with_processes(world, buffer_bytes, calls);
      with_threads(world, buffer_bytes, calls);
    }
    if (world > 1) with_threads(world, 4096, run_refusals);
    std::printf("world %d: right\n", world);
    std::fflush(stdout);
  }
}

}  // namespace pycollect::ipc

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 300;
  std::vector<int> worlds;
  for (int i = 2; i < argc; ++i) worlds.push_back(std::atoi(argv[i]));
  if (worlds.empty()) worlds = {1, 2, 3, 4, 5, 8};
  const bool forks = std::getenv("NO_FORK") == nullptr;  // ThreadSanitizer does not follow forks
  pycollect::ipc::test(cases, worlds, forks);
}
