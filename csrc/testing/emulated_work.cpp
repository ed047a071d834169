// Work on the emulator's streams (emulator.h). A launch becomes functions that run the host's folds
// on real bytes.
#include <algorithm>

#include "../cuda/device_guard.h"
#include "../cuda/kernel_table.h"
#include "emulator.h"
#include "reference_kernels.h"

namespace pycollect::cuda {
void Emulator::enqueue(Stream stream, Operation operation) {
  const std::size_t n = number(stream);
  StreamState& s = states_[n];
  demand(capture_ == 0 || !records_ || s.capture != 0 || allows_eager_work_, operation.what,
         " on a stream that has not joined the capture");
  if (s.clock.size() <= n) s.clock.resize(n + 1);
  ++s.clock[n];
  operation.stream = static_cast<int>(n);
  if (records_) {
    trace_.operations.push_back(std::move(operation));
  } else {
    streams_.enqueue(n, [this, parts = std::move(operation.parts)] {
      for (const auto& part : parts) part();
      return true;
    });
  }
}

void Emulator::enqueue(Stream stream, const char* call, EmulatedStreams::Work work) {
  const Lock lock = locked();
  enter(call);
  log(call, state(stream, call));
  const std::size_t n = number(stream);
  streams_.enqueue(n, std::move(work));
  if (streams_.eager() && states_[n].owner == Owner::group) streams_.advance(streams_.end(n));
}

// The copy kernel, and that of a dtype and op.
void Emulator::load(Device device, DType dtype, ReduceOp op) {
  {
    const Lock lock = locked();
    const bool copies = loaded_.insert({device, -1, -1}).second;
    if (!loaded_.insert({device, static_cast<int>(dtype), static_cast<int>(op)}).second && !copies)
      return;
  }
  const CaptureModeGuard guard(*this, device);
  synchronize_all("load");
}

// Waits for all streams at the first launch of a kernel: CUDA may load the kernel there, and
// synchronizes to do so. That is forbidden during a capture.
void Emulator::load(Stream stream, const Launch& launch) {
  const bool copies = std::all_of(launch.works.begin(), launch.works.end(),
                                  [](const LaunchWork& work) { return work.srcs.size() == 1; });
  const int dtype = copies ? -1 : static_cast<int>(launch.dtype);
  const int op = copies ? -1 : static_cast<int>(launch.op);
  {
    const Lock lock = locked();
    if (!loaded_.insert({stream.device, dtype, op}).second) return;
  }
  synchronize_all("load");
}

void Emulator::launch(Stream stream, const Launch& launch) {
  load(stream, launch);
  Lock lock = locked();
  enter("launch");
  state(stream, "launch");
  demand(!launch.works.empty(), "a launch without work");
  counters_["works"] += static_cast<int>(launch.works.size());
  if (is_dropped("launch")) return;
  Operation o{.kind = Operation::Kind::work, .what = text("a launch on stream ", number(stream))};
  const auto how = std::make_shared<const Launch>(launch);
  for (std::size_t i = 0; i < how->works.size(); ++i) {
    const LaunchWork& work = how->works[i];
    const int alignment = kUnits[static_cast<int>(how->dtype)][static_cast<int>(how->op)].alignment;
    for (const auto* side : {&work.dsts, &work.srcs})
      for (const std::byte* at : *side)
        demand(work.srcs.size() == 1 || reinterpret_cast<std::uintptr_t>(at) % alignment == 0,
               "misaligned address");
    if (records_)
      for (const MemoryAccess& t :
           accesses(stream.device, work, item_bytes(how->dtype), static_cast<int>(i)))
        o.accesses.push_back(t);
    o.parts.emplace_back([how, &work] { fold(work, *how); });
  }
  enqueue(stream, std::move(o));
  return_late("launch", lock, streams_.end(number(stream)));
}

// For a copy to pageable memory, CUDA makes the host wait for earlier work without a time limit, so
// a running emulator allows copies only on an idle stream.
void Emulator::copy(Stream stream, const CopyRect& it) {
  const Lock lock = locked();
  enter("copy");
  state(stream, "copy");
  demand(it.bytes > 0 && it.rows > 0, "a copy of zero bytes");
  Operation o{.kind = Operation::Kind::work, .what = text("a copy on stream ", number(stream))};
  if (records_) {
    o.accesses = accesses(it);
    for (const MemoryAccess& t : o.accesses)
      demand(region(t.begin, t.bytes).kind != MemoryKind::pageable || capture_ == 0,
             "a copy of pageable memory during a capture");
    demand(it.src_device == kHost || it.dst_device == kHost || it.src_device == it.dst_device ||
               peers_[it.src_device][it.dst_device] || peers_[it.dst_device][it.src_device],
           "a copy between devices ", it.src_device, " and ", it.dst_device,
           ", which do not reach each other");
  } else if (!streams_.is_idle(number(stream))) {
    violation("a copy on a busy stream, which can block the host without a time limit");
  }
  o.parts.emplace_back([it] { move(it); });
  enqueue(stream, std::move(o));
}

}  // namespace pycollect::cuda
