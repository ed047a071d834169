// See emulated_run.h.
#include "emulated_run.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <random>
#include <utility>

#include "../cpu/executor.h"
#include "../plan/error.h"
#include "../plan/passes.h"

namespace pycollect::cuda {

int devices_of(const TestCase& test_case) {
  require(static_cast<int>(test_case.devices.size()) == test_case.plan.world, "there are ",
          test_case.devices.size(), " devices; pass one for each of ", test_case.plan.world,
          " ranks");
  return std::max(0, *std::max_element(test_case.devices.begin(), test_case.devices.end())) + 1;
}

CompiledPlan staged(const TestCase& test_case) {
  const int world = test_case.plan.world;
  MemoryReach reach{std::vector<bool>(world), {}};
  bool all = true;
  for (Rank r = 0; r < world; ++r) {
    reach.on_host[r] = test_case.devices[r] < 0;
    reach.directly.emplace_back();
    for (Rank of = 0; of < world; ++of)
      reach.directly[r].push_back(test_case.peers || test_case.devices[r] == test_case.devices[of]);
    all &= !reach.on_host[r] && reach.directly[r] == std::vector<bool>(world, true);
  }
  if (all) return compile(test_case.plan, test_case.in_place, test_case.level_policy);
  return compile(stage(test_case.plan, test_case.in_place, reach, test_case.pieces),
                 test_case.in_place, test_case.level_policy);
}

PlanOffsets make_offsets(ChunkSizes how, const Plan& written, const Plan& plan, int pieces,
                         int number) {
  const std::size_t least = pieces;
  auto size = [&](std::size_t a) {
    return least + (how == ChunkSizes::even ? 0 : (7 * a + number) % 3);
  };
  Sizes sizes;
  for (int c = 0; c < written.chunks; ++c) sizes.push_back(size(c));
  PlanOffsets offsets(plan, sizes);
  for (int r = 0; how == ChunkSizes::each && r < written.world; ++r) {
    Sizes given, got;
    for (int of = 0; of < written.chunks; ++of) {
      given.push_back(size(3 * r + of));
      got.push_back(size(3 * of + r));
    }
    offsets.set(r, Buffer::input, given);
    offsets.set(r, Buffer::output, got);
  }
  return offsets;
}

ChunkSizes choose_chunk_sizes(const Plan& written, const Plan& run, int pieces, int bindings) {
  for (ChunkSizes how : {ChunkSizes::uneven, ChunkSizes::each}) try {
      for (int number = 0; number < bindings; ++number) {
        PlanOffsets offsets = make_offsets(how, written, run, pieces, number);
        cut_host_memory(run, offsets);
      }
      return how;
    } catch (const std::invalid_argument&) {
    }
  return ChunkSizes::even;
}

std::vector<std::byte> random_values(std::size_t bytes, DType type, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i + item_bytes(type) <= bytes; i += item_bytes(type)) {
    const float value = std::uniform_real_distribution<float>(-1, 1)(random);
    const uint64_t bits = random();
    if (type == DType::f32)
      std::memcpy(&made[i], &value, sizeof value);
    else if (type == DType::bf16)  // the upper half of a float
      std::memcpy(&made[i], reinterpret_cast<const char*>(&value) + 2, 2);
    else
      std::memcpy(&made[i], &bits, item_bytes(type));
  }
  return made;
}

namespace {

constexpr std::byte kGarbage{0x5a};
constexpr std::chrono::seconds kLongestDrain(10);

}  // namespace

EmulatedRun::EmulatedRun(TestCase test_case, const EmulatedRun* machine_of)
    : test_case_(std::move(test_case)),
      machine_(machine_of
                   ? machine_of->machine_
                   : std::make_shared<EmulatedMachine>(devices_of(test_case_), test_case_.ring)),
      cuda_(*machine_->cuda),
      written_(compile(test_case_.plan, test_case_.in_place)),
      compiled_(staged(test_case_)),
      chunk_sizes_(choose_chunk_sizes(written_.plan, compiled_.plan, test_case_.pieces,
                                      test_case_.bindings)),
      expected_{written_, test_case_.dtype, test_case_.op, {.world = test_case_.plan.world}},
      bound_{compiled_, test_case_.dtype, test_case_.op, {.world = test_case_.plan.world}} {
  require(test_case_.dtype == DType::f32 || test_case_.dtype == DType::bf16 ||
              (test_case_.dtype >= DType::i8 && test_case_.dtype <= DType::u8),
          "an emulated run has no test data of dtype ", name(test_case_.dtype),
          "; use float32, bfloat16 or an integer dtype");
  const int devices = devices_of(test_case_);
  for (Device a = 0; a < devices; ++a)
    for (Device b = 0; b < devices; ++b)
      if (test_case_.peers || a == b) cuda_.connect(a, b);
  create_streams();
  for (int i = 0; i < test_case_.bindings; ++i) add_tensor(i);
  expect();
}

void EmulatedRun::replace_streams(bool callers_apart) {
  test_case_.callers_apart = callers_apart;
  create_streams();
}

void EmulatedRun::create_streams() {
  streams_ = {};
  using StreamsByRank = std::map<std::pair<int, Device>, Stream>;
  StreamsByRank callers, d2h_streams, h2d_streams;
  auto stream = [&](StreamsByRank& made, bool per_rank, Rank rank, Device device) {
    const auto [at, is_new] = made.try_emplace({per_rank ? rank : -1, device});
    if (is_new) at->second = cuda_.create_stream(device);
    return at->second;
  };
  const auto on_device = [](Device d) { return d >= 0; };
  const Device first = *std::find_if(test_case_.devices.begin(), test_case_.devices.end(),
                                     on_device);  // exists: checked by `stage`
  for (Rank r = 0; r < test_case_.plan.world; ++r) {
    const Device at = std::max(test_case_.devices[r], kHost), on = at == kHost ? first : at;
    const Stream caller = stream(callers, test_case_.callers_apart, r, on);
    RankStreams streams{at, caller};
    if (test_case_.copy_streams) {
      streams.d2h = stream(d2h_streams, false, r, on);
      streams.h2d = stream(h2d_streams, false, r, on);
    }
    streams_.ranks.push_back(streams);
    streams_.host_waits |= test_case_.devices[r] == kHost && test_case_.host_waits;
  }
}

bool EmulatedRun::is_pageable(Rank rank, int buffer) const {
  return test_case_.devices[rank] == kPageableHost && buffer <= static_cast<int>(Buffer::output);
}

std::byte* EmulatedRun::add_block(Rank rank, int buffer, std::size_t bytes) {
  const bool on_host = buffer == static_cast<int>(Buffer::host) || test_case_.devices[rank] < 0;
  const MemoryKind kind = is_pageable(rank, buffer) ? MemoryKind::pageable
                          : on_host                 ? MemoryKind::pinned
                                                    : MemoryKind::device;
  std::byte* const base = cuda_.allocate(kind, test_case_.devices[rank], bytes);
  const uint64_t seed = blocks_.size() + 1;
  auto before = random_values(bytes, test_case_.dtype, seed);
  blocks_.push_back(std::make_unique<TestBlock>(
      TestBlock{base, rank, before, before, buffer <= static_cast<int>(Buffer::output),
                is_pageable(rank, buffer)}));
  return base;
}

void EmulatedRun::add_tensor(int number) {
  const std::size_t rows = 1 + number % 2, item = item_bytes(test_case_.dtype);
  const Plan &written = written_.plan, &run = compiled_.plan;
  const std::size_t buffers = static_cast<std::size_t>(test_case_.plan.world) * kBuffers;
  // Chunk offsets in the original plan, and in the staged one.
  Binding expected{make_offsets(chunk_sizes_, written, written, test_case_.pieces, number),
                   std::vector<BufferMemory>(buffers), rows};
  Binding bound{make_offsets(chunk_sizes_, written, run, test_case_.pieces, number),
                std::vector<BufferMemory>(buffers), rows};
  cut_host_memory(run, bound.offsets);
  for (Rank r = 0; r < test_case_.plan.world; ++r)
    for (int b = 0; b < kBuffers; ++b) {
      const auto buffer = static_cast<Buffer>(b);
      auto& at = bound.memory[r * kBuffers + b];
      auto& there = expected.memory[r * kBuffers + b];
      const bool scratched = compiled_.scratched[r] || written_.scratched[r];
      if (test_case_.in_place && buffer == Buffer::output) {
        at = bound.memory[r * kBuffers];
        there = expected.memory[r * kBuffers];
        continue;
      }
      if ((buffer == Buffer::scratch && !scratched) ||
          (buffer == Buffer::host && !compiled_.staged[r]))
        continue;
      // The pitch is larger than a row, so that rows are not contiguous.
      const auto pitch =
          static_cast<std::ptrdiff_t>((bound.offsets.total(r, buffer) + 2 * (rows - 1)) * item);
      at = {add_block(r, b, pitch * rows), pitch, is_pageable(r, b)};
      there = {blocks_.back()->after.data(), pitch};
    }
  expected_.bindings.push_back(std::move(expected));
  bound_.bindings.push_back(std::move(bound));
}

void EmulatedRun::expect() { cpu::run_in_order(expected_); }

// Accesses all memory: pageable memory, and host memory for which the executor waits, by the host;
// all other memory, by the stream of its rank's caller.
void EmulatedRun::callers_access(const char* what, void (*act)(TestBlock&)) {
  for (Rank r = 0; r < test_case_.plan.world; ++r) {
    const bool waited = test_case_.devices[r] == kHost && test_case_.host_waits;
    for (const bool by_host : {true, false}) {
      std::vector<MemoryAccess> accesses;
      std::vector<TestBlock*> mine;
      for (const auto& block : blocks_)
        if (block->rank == r && (waited || block->is_pageable) == by_host) {
          accesses.push_back({block->base, block->before.size(), true, 0});
          mine.push_back(block.get());
        }
      if (mine.empty()) continue;
      auto all = [mine, act] {
        for (TestBlock* block : mine) act(*block);
      };
      const std::string label = text("rank ", r, what);
      if (by_host)
        cuda_.host_work(label, std::move(accesses), all);
      else
        cuda_.caller_work(streams_.ranks[r].caller, label, std::move(accesses), all);
    }
  }
}

void EmulatedRun::execute() {
  std::vector<Stream> callers;
  for (const RankStreams& r : streams_.ranks)
    if (std::find(callers.begin(), callers.end(), r.caller) == callers.end())
      callers.push_back(r.caller);
  DeviceGuard device(cuda_);
  streams_.capture = capture_of(cuda_, device, callers);
  check_call(bound_, streams_);
  machine_->executor.enqueue(bound_, streams_, device);
}

void EmulatedRun::run_half_captured() {
  cuda_.clear_log();
  cuda_.begin_capture(streams_.ranks[0].caller);
  execute();
}

// Forks the other callers' streams into the capture of the first caller's stream, or joins them
// back to it.
void EmulatedRun::fork_or_join_callers(bool fork) {
  const Stream first = streams_.ranks[0].caller;
  for (const RankStreams& streams : streams_.ranks) {
    if (streams.caller == first) continue;
    const Stream from = fork ? first : streams.caller, to = fork ? streams.caller : first;
    cuda_.set_device(from.device);
    const Event event = cuda_.create_event(from.device);
    cuda_.record(event, from);
    cuda_.set_device(to.device);
    cuda_.wait(to, event);
    cuda_.destroy(event);
  }
}

void EmulatedRun::run(int calls, bool capture) {
  calls_ = calls;
  capture_ = capture;
  cuda_.streams().set_order(WorkOrder::late);
  issue();
}

void EmulatedRun::issue() {
  cuda_.clear_log();
  if (skipped_) cuda_.inject(Fault{FaultKind::skip, "wait", *skipped_});
  const Device before = cuda_.current_device();
  if (capture_) {
    cuda_.begin_capture(streams_.ranks[0].caller);
    fork_or_join_callers(true);
    cuda_.set_device(before);
  }
  std::exception_ptr failure;
  for (int i = 0; i < calls_ && !failure; ++i) failure = call();
  if (capture_) {
    fork_or_join_callers(false);
    cuda_.end_capture(streams_.ranks[0].caller);
    cuda_.set_device(before);
  }
  cuda_.inject({});
  require(cuda_.streams().drain_all(kLongestDrain), "deadlock: work waits for each other");
  if (failure) std::rethrow_exception(failure);
}

// Returns the exception of a call that failed. The callers access their memory afterwards in any
// case.
std::exception_ptr EmulatedRun::call() {
  std::exception_ptr failure;
  const Device before = cuda_.current_device();
  callers_access("'s caller before the call",
                 [](TestBlock& b) { std::memcpy(b.base, b.before.data(), b.before.size()); });
  if (fail_after_ >= 0) cuda_.inject(Fault{FaultKind::fail, "", std::exchange(fail_after_, -1)});
  try {
    execute();
  } catch (...) {
    failure = std::current_exception();
  }
  if (!skipped_) cuda_.inject({});
  require(cuda_.current_device() == before, "the executor left another device current");
  callers_access("'s caller after the call", [](TestBlock& b) {
    b.wrong |= b.is_checked && !std::equal(b.after.begin(), b.after.end(), b.base);
    std::fill_n(b.base, b.after.size(), kGarbage);
  });
  return failure;
}

std::string EmulatedRun::mismatch(int64_t seed) {
  for (const auto& block : blocks_) {
    block->wrong = false;
    std::fill_n(block->base, block->after.size(), kGarbage);
  }
  cuda_.streams().set_order(seed < 0 ? WorkOrder::as_issued : WorkOrder::random,
                            static_cast<uint64_t>(seed));
  issue();
  for (const auto& block : blocks_)
    if (block->wrong)
      return text("a buffer of rank ", block->rank, " differs from the result of the plan");
  return {};
}

}  // namespace pycollect::cuda
