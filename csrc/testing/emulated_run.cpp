#include "emulated_run.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "../cpu/executor.h"
#include "../plan/error.h"
#include "../plan/stage.h"

namespace pycollect::cuda {
namespace {

constexpr std::byte kRubbish{0x5a};

}  // namespace

EmulatedRun::EmulatedRun(TestCase test_case, const EmulatedRun* beside)
    : test_case_(std::move(test_case)),
      machine_(beside ? beside->machine_
                      : std::make_shared<Machine>(devices_of(test_case_), test_case_.ring)),
      cuda_(*machine_->cuda),
      written_(compile(test_case_.plan, test_case_.in_place)),
      compiled_(staged(test_case_)),
      cut_(how_to_cut(written_.plan, compiled_.plan, test_case_.pieces, test_case_.bindings)) {
  require(test_case_.dtype == DType::f32 || test_case_.dtype == DType::bf16 ||
              (test_case_.dtype >= DType::i8 && test_case_.dtype <= DType::u8),
          "an emulated run has no numbers of type ", name(test_case_.dtype));
  const int devices = devices_of(test_case_);
  for (Device a = 0; a < devices; ++a)
    for (Device b = 0; b < devices; ++b)
      if (test_case_.peers || a == b) cuda_.connect(a, b);
  make_posts();
  for (int i = 0; i < test_case_.bindings; ++i) add_tensor(i);
  expect();
}

void EmulatedRun::reseat(Workers workers, bool callers_apart) {
  test_case_.workers = workers;
  test_case_.callers_apart = callers_apart;
  make_posts();
}

void EmulatedRun::make_posts() {
  posts_ = {};
  using Made = std::map<std::pair<int, Device>, Stream>;
  Made callers, workers, senders, receivers;
  auto stream = [&](Made& made, bool apart, Rank rank, Device device) {
    const auto [at, is_new] = made.try_emplace({apart ? rank : -1, device});
    if (is_new) at->second = cuda_.create_stream(device);
    return at->second;
  };
  const auto on_device = [](Device d) { return d >= 0; };
  const Device first = *std::find_if(test_case_.devices.begin(), test_case_.devices.end(),
                                     on_device);  // `stage` checked it
  const bool own = test_case_.workers == Workers::ranks;
  for (Rank r = 0; r < test_case_.plan.world; ++r) {
    const Device at = std::max(test_case_.devices[r], kHost), on = at == kHost ? first : at;
    const Stream caller = stream(callers, test_case_.callers_apart, r, on);
    RankStreams post{at, caller,
                     test_case_.workers == Workers::callers ? caller : stream(workers, own, r, on)};
    if (test_case_.lanes) {
      post.sender = stream(senders, own, r, on);
      post.receiver = stream(receivers, own, r, on);
    }
    posts_.ranks.push_back(post);
    posts_.host_waits |= test_case_.devices[r] == kHost && test_case_.host_waits;
  }
  if (test_case_.hub) posts_.hub = cuda_.create_stream(first);
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
  auto before = numbers(bytes, test_case_.dtype, seed);
  blocks_.push_back(std::make_unique<TestBlock>(
      TestBlock{base, rank, before, before, buffer <= static_cast<int>(Buffer::output),
                is_pageable(rank, buffer)}));
  return base;
}

void EmulatedRun::add_tensor(int number) {
  const std::size_t rows = 1 + number % 2, item = item_bytes(test_case_.dtype);
  const Plan &written = written_.plan, &run = compiled_.plan;
  tensors_.push_back(std::make_unique<TestTensor>(
      TestTensor{cut_as(cut_, written, written, test_case_.pieces, number),
                 cut_as(cut_, written, run, test_case_.pieces, number)}));
  cut_host_memory(run, tensors_.back()->run);
  const TestTensor& t = *tensors_.back();
  const std::size_t buffers = static_cast<std::size_t>(test_case_.plan.world) * kBuffers;
  Binding expected{&t.written, std::vector<Memory>(buffers), rows};
  Binding bound{&t.run, std::vector<Memory>(buffers), rows};
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
          static_cast<std::ptrdiff_t>((t.run.total(r, buffer) + 2 * (rows - 1)) * item);
      at = {add_block(r, b, pitch * rows), pitch, is_pageable(r, b)};
      there = {blocks_.back()->after.data(), pitch};
    }
  expected_.push_back(std::move(expected));
  bound_.push_back(std::move(bound));
}

void EmulatedRun::expect() {
  cpu::run_in_order(
      {written_, expected_, test_case_.dtype, test_case_.op, {.world = test_case_.plan.world}});
}

// The host accesses pageable memory, and memory on the host that the executor has waited for. The
// caller's stream accesses all other memory.
void EmulatedRun::callers_touch(const char* what, void (*act)(TestBlock&)) {
  for (Rank r = 0; r < test_case_.plan.world; ++r) {
    const bool waited = test_case_.devices[r] == kHost && test_case_.host_waits;
    for (const bool by_host : {true, false}) {
      std::vector<Touch> touches;
      std::vector<TestBlock*> mine;
      for (const auto& block : blocks_)
        if (block->rank == r && (waited || block->is_pageable) == by_host) {
          touches.push_back({block->base, block->before.size(), true, 0});
          mine.push_back(block.get());
        }
      if (mine.empty()) continue;
      auto all = [mine, act] {
        for (TestBlock* block : mine) act(*block);
      };
      const std::string who = text("rank ", r, what);
      if (by_host)
        cuda_.host(who, std::move(touches), all);
      else
        cuda_.somebody(posts_.ranks[r].caller, who, std::move(touches), all);
    }
  }
}

void EmulatedRun::execute() {
  machine_->executor.run(
      {compiled_, bound_, test_case_.dtype, test_case_.op, {.world = test_case_.plan.world}},
      posts_);
}

void EmulatedRun::run_half_captured() {
  cuda_.forget_trace();
  cuda_.begin_capture(posts_.ranks[0].caller);
  execute();
}

// Forks the other callers' streams into the capture of the first one, or joins them back to it.
void EmulatedRun::through_callers(bool fork) {
  const Stream first = posts_.ranks[0].caller;
  for (const RankStreams& post : posts_.ranks) {
    if (post.caller == first) continue;
    const Stream from = fork ? first : post.caller, to = fork ? post.caller : first;
    cuda_.set_device(from.device);
    const Event event = cuda_.create_event(from.device);
    cuda_.record(event, from);
    cuda_.set_device(to.device);
    cuda_.wait(to, event);
    cuda_.destroy(event);
  }
}

void EmulatedRun::run(int calls, bool capture) {
  cuda_.forget_trace();
  const Device before = cuda_.current_device();
  if (capture) {
    cuda_.begin_capture(posts_.ranks[0].caller);
    through_callers(true);
    cuda_.set_device(before);
  }
  std::exception_ptr failure;
  for (int i = 0; i < calls && !failure; ++i) failure = call();
  if (capture) {
    through_callers(false);
    cuda_.end_capture(posts_.ranks[0].caller);
    cuda_.set_device(before);
  }
  if (failure) std::rethrow_exception(failure);
}

// The callers continue after a call that failed, too. Returns the exception.
std::exception_ptr EmulatedRun::call() {
  std::exception_ptr failure;
  const Device before = cuda_.current_device();
  callers_touch("'s caller before",
                [](TestBlock& b) { std::memcpy(b.base, b.before.data(), b.before.size()); });
  cuda_.begin_call();
  cuda_.fail_call(std::exchange(fail_in_, -1));
  try {
    execute();
  } catch (...) {
    failure = std::current_exception();
  }
  cuda_.fail_call(-1);
  require(cuda_.current_device() == before, "the executor left another device current");
  callers_touch("'s caller behind", [](TestBlock& b) {
    b.wrong |= b.is_judged && !std::equal(b.after.begin(), b.after.end(), b.base);
    std::fill_n(b.base, b.after.size(), kRubbish);
  });
  return failure;
}

std::string EmulatedRun::mismatch(int64_t seed) {
  for (const auto& block : blocks_) {
    block->wrong = false;
    std::fill_n(block->base, block->after.size(), kRubbish);
  }
  if (seed < 0)
    run_as_issued(cuda_.trace());
  else
    run_shuffled(cuda_.trace(), static_cast<uint64_t>(seed));
  for (const auto& block : blocks_)
    if (block->wrong) return text("a buffer of rank ", block->rank, " has other bits");
  return {};
}

}  // namespace pycollect::cuda
