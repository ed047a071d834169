// Memory and work of the emulator (emulator.h). A launch runs the host's folds on real bytes.
#include <algorithm>
#include <cstring>

#include "../cpu/fold.h"
#include "../cuda/device_guard.h"
#include "../cuda/kernels.h"
#include "emulator.h"

namespace pycollect::cuda {
namespace {

// --- launches and copies, on real bytes ----------------------------------------------------------

// Executes one kernel task of a launch, a fold or a copy; only the type, op and options of `how`
// are used.
void fold(const KernelTask& task, const Launch& how) {
  std::vector<void*> dsts(task.dsts.begin(), task.dsts.end()),
      srcs(task.srcs.begin(), task.srcs.end());
  const bool scales = how.op != ReduceOp::avg || task.finishes;
  const cpu::Fold run =
      cpu::find_fold(how.dtype, scales ? how.op : ReduceOp::sum, how.options.order);
  auto n = [](const std::vector<void*>& v) { return static_cast<int>(v.size()); };
  for (std::size_t r = 0; r < task.rows; ++r) {
    if (how.options.widens)
      cpu::AccumulatorFold(how.dtype, how.op)
          .run(task.finishes, {dsts.data(), n(dsts)}, true, {srcs.data(), n(srcs)}, 0, 0,
               task.count, how.options);
    else if (srcs.size() == 1)
      cpu::copy({dsts.data(), n(dsts)}, srcs[0], task.count * item_bytes(how.dtype), false);
    else
      run({dsts.data(), n(dsts)}, {srcs.data(), n(srcs)}, task.count, how.options);
    auto advance = [](std::vector<void*>& at, const std::vector<std::ptrdiff_t>& pitches) {
      for (std::size_t i = 0; i < pitches.size(); ++i)  // a single row may need no pitches
        at[i] = static_cast<std::byte*>(at[i]) + pitches[i];
    };
    advance(dsts, task.dst_pitches);
    advance(srcs, task.src_pitches);
  }
}

void move(const CopyRect& it) {
  for (std::size_t r = 0; r < it.rows; ++r) {
    const auto row = static_cast<std::ptrdiff_t>(r);
    std::memmove(it.dst + it.dst_pitch * row, it.src + it.src_pitch * row, it.bytes);
  }
}

}  // namespace

// --- memory -------------------------------------------------------------------------------------

std::byte* Emulator::allocate(MemoryKind kind, Device device, std::size_t bytes) {
  const Lock lock = locked();
  auto storage = std::make_unique<std::byte[]>(bytes + 1);  // regions are never adjacent
  std::byte* const base = storage.get();
  std::fill_n(base, bytes, std::byte{kPoison});
  regions_[base] = {bytes, kind, kind == MemoryKind::device ? device : kHost, std::move(storage)};
  return base;
}

void Emulator::adopt(MemoryKind kind, std::byte* memory, std::size_t bytes) {
  const Lock lock = locked();
  regions_[memory] = {bytes, kind, kHost, nullptr};
}

std::byte* Emulator::new_pinned(std::size_t bytes) {
  require_no_capture("allocation of pinned memory");
  enter("new_pinned");
  return allocate(MemoryKind::pinned, kHost, bytes);
}

const Emulator::EmulatedAllocation* Emulator::find(const std::byte* address) const {
  const Lock lock = locked();
  const auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) return nullptr;
  const auto& [base, r] = *std::prev(after);
  return address < base + r.bytes ? &r : nullptr;
}

MemoryKind Emulator::kind_of(const std::byte* address) const {
  const EmulatedAllocation* const known = find(address);
  if (known != nullptr) return known->kind;
  return stands_in_ ? MemoryKind::device : MemoryKind::pageable;
}

const Emulator::EmulatedAllocation& Emulator::region(const std::byte* begin,
                                                     std::size_t bytes) const {
  auto after = regions_.upper_bound(begin);
  demand(after != regions_.begin(), "an address outside of all allocations");
  const auto& [base, r] = *std::prev(after);
  demand(begin + bytes <= base + r.bytes, "an access beyond the end of its allocation");
  return r;
}

void Emulator::require_access(Device device, const std::byte* begin, std::size_t bytes) const {
  const EmulatedAllocation& r = region(begin, bytes);
  demand(r.kind != MemoryKind::pageable, "a kernel accesses pageable memory");
  demand(r.kind == MemoryKind::pinned || r.device == device || peers_[device][r.device], "device ",
         device, " cannot access the memory of device ", r.device);
}

std::vector<MemoryAccess> Emulator::accesses(Device device, const KernelTask& task,
                                             const Launch& how, int part) const {
  demand(task.count > 0 && task.rows > 0 && !task.dsts.empty() && !task.srcs.empty(),
         "a kernel task without elements or without pointers");
  const std::size_t item = item_bytes(how.dtype);
  const std::size_t dst_item = how.options.widens ? item_bytes(accumulator(how.dtype)) : item;
  std::vector<MemoryAccess> all;
  auto side = [&](const std::vector<std::byte*>& at, const std::vector<std::ptrdiff_t>& pitches,
                  bool writes) {
    const std::size_t bytes = task.count * (writes ? dst_item : item);
    demand(at.size() == pitches.size(), "a kernel task without a pitch for each pointer");
    for (std::size_t i = 0; i < at.size(); ++i)
      for (std::size_t r = 0; r < task.rows; ++r) {
        const std::byte* const begin = at[i] + pitches[i] * static_cast<std::ptrdiff_t>(r);
        if (stands_in_ && !knows(begin)) continue;
        require_access(device, begin, bytes);
        all.push_back({begin, bytes, writes, part});
      }
  };
  side(task.srcs, task.src_pitches, false);
  side(task.dsts, task.dst_pitches, true);
  for (const MemoryAccess& a : all)
    for (const MemoryAccess& b : all)
      demand(!b.writes || a.begin == b.begin || a.begin + a.bytes <= b.begin ||
                 b.begin + b.bytes <= a.begin,
             "a kernel task whose destination partly overlaps another of its slices");
  return all;
}

std::vector<MemoryAccess> Emulator::accesses(const CopyRect& it) const {
  std::vector<MemoryAccess> all;
  for (std::size_t r = 0; r < it.rows; ++r) {
    const auto row = static_cast<std::ptrdiff_t>(r);
    for (bool writes : {false, true}) {
      const std::byte* at = writes ? it.dst + it.dst_pitch * row : it.src + it.src_pitch * row;
      const Device owner = knows(at) ? region(at, it.bytes).device : kHost;
      demand(owner == (writes ? it.dst_device : it.src_device),
             "a copy names a device that does not own the address");
      all.push_back({at, it.bytes, writes, 0});
    }
  }
  return all;
}

// --- work ---------------------------------------------------------------------------------------

void Emulator::add(Stream stream, Operation operation, std::function<void()> act) {
  const Lock lock = locked();
  const std::size_t n = number(stream);
  StreamState& s = states_[n];
  demand(capture_ == 0 || s.capture != 0 || allows_eager_work_, operation.what,
         " on a stream that has not joined the capture");
  if (s.clock.size() <= n) s.clock.resize(n + 1);
  ++s.clock[n];
  operation.stream = static_cast<int>(n);
  if (!operation.accesses.empty()) log_.operations.push_back(std::move(operation));
  const auto work = [act = std::move(act)] {
    act();
    return true;
  };
  streams_.enqueue(n, work);
}

void Emulator::enqueue(Stream stream, const char* call, std::vector<MemoryAccess> accesses,
                       std::function<void()> act) {
  const Lock lock = locked();
  if (!enter(call)) return;
  log_call(call, state(stream, call));
  add(stream, {.kind = Operation::Kind::work, .what = call, .accesses = std::move(accesses)},
      std::move(act));
}

void Emulator::caller_work(Stream stream, std::string what, std::vector<MemoryAccess> accesses,
                           std::function<void()> act) {
  add(stream,
      {.kind = Operation::Kind::work, .what = std::move(what), .accesses = std::move(accesses)},
      std::move(act));
}

void Emulator::host_work(std::string what, std::vector<MemoryAccess> accesses,
                         const std::function<void()>& act) {
  const Lock lock = locked();
  log_.operations.push_back({.kind = Operation::Kind::host_work,
                             .what = std::move(what),
                             .accesses = std::move(accesses)});
  act();
}

void Emulator::copy(const CopyRect& it) {
  demand(it.bytes > 0 && it.rows > 0, "a host copy of zero bytes");
  demand(capture_ == 0 || allows_eager_work_, "a host copy during a capture");
  host_work("a copy by the host", accesses(it), [it] { move(it); });
  const Lock lock = locked();
  ++counters_["host_copy"];
}

void Emulator::launch(Stream stream, const Launch& launch) {
  load_at_launch(stream.device, launch);
  const Lock lock = locked();
  if (!enter("launch")) return;
  state(stream, "launch");
  demand(!launch.tasks.empty(), "a launch without tasks");
  counters_["tasks"] += static_cast<int>(launch.tasks.size());
  Operation o{.kind = Operation::Kind::work, .what = text("a launch on stream ", number(stream))};
  const auto how = std::make_shared<const Launch>(launch);
  for (std::size_t i = 0; i < how->tasks.size(); ++i) {
    const KernelTask& task = how->tasks[i];
    const int alignment = kUnits[static_cast<int>(how->dtype)][static_cast<int>(how->op)].alignment;
    for (const auto* side : {&task.dsts, &task.srcs})
      for (const std::byte* at : *side)
        demand(task.srcs.size() == 1 || reinterpret_cast<std::uintptr_t>(at) % alignment == 0,
               "misaligned address");
    for (const MemoryAccess& t : accesses(stream.device, task, *how, static_cast<int>(i)))
      o.accesses.push_back(t);
  }
  const auto act = [this, how] {
    for (const std::size_t i : streams_.any_order(how->tasks.size())) fold(how->tasks[i], *how);
  };
  add(stream, std::move(o), act);
}

void Emulator::copy(Stream stream, const CopyRect& it) {
  const Lock lock = locked();
  if (!enter("copy")) return;
  state(stream, "copy");
  demand(it.bytes > 0 && it.rows > 0, "a copy of zero bytes");
  Operation o{.kind = Operation::Kind::work, .what = text("a copy on stream ", number(stream))};
  o.accesses = accesses(it);
  for (const MemoryAccess& t : o.accesses)
    demand(kind_of(t.begin) != MemoryKind::pageable || capture_ == 0,
           "a copy of pageable memory during a capture");
  demand(it.src_device == kHost || it.dst_device == kHost || it.src_device == it.dst_device ||
             peers_[it.src_device][it.dst_device] || peers_[it.dst_device][it.src_device],
         "a copy between devices ", it.src_device, " and ", it.dst_device,
         ", which do not reach each other");
  add(stream, std::move(o), [it] { move(it); });
}

}  // namespace pycollect::cuda
