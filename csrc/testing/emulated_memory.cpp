// Memory of the emulator (emulator.h).
#include "emulator.h"
#include "reference_kernels.h"

namespace pycollect::cuda {

std::byte* Emulator::allocate(MemoryKind kind, Device device, std::size_t bytes) {
  auto storage = std::make_unique<std::byte[]>(bytes + 1);  // regions are never adjacent
  std::byte* const base = storage.get();
  const Device at = kind == MemoryKind::device ? device : kHost;
  regions_[base] = {bytes, kind, at, std::move(storage)};
  return base;
}

void Emulator::adopt(MemoryKind kind, std::byte* memory, std::size_t bytes) {
  regions_[memory] = {bytes, kind, kHost, nullptr};
}

std::byte* Emulator::new_pinned(std::size_t bytes) {
  require_no_capture("allocation of pinned memory");
  enter("new_pinned");
  return allocate(MemoryKind::pinned, kHost, bytes);
}

void Emulator::copy(const CopyRect& it) {
  demand(it.bytes > 0 && it.rows > 0, "a host copy of zero bytes");
  demand(capture_ == 0 || allows_eager_work_, "a host copy during a capture");
  host_work("a copy by the host", accesses(it), [it] { move(it); });
  ++counters_["host_copy"];
}

const Emulator::EmulatedAllocation* Emulator::find(const std::byte* address) const {
  const auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) return nullptr;
  const auto& [base, r] = *std::prev(after);
  return address < base + r.bytes ? &r : nullptr;
}

MemoryKind Emulator::kind_of(const std::byte* address) const {
  const EmulatedAllocation* const known = find(address);
  return known != nullptr ? known->kind : MemoryKind::pageable;
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

std::vector<MemoryAccess> Emulator::accesses(Device device, const LaunchWork& work,
                                             std::size_t item, int part) const {
  demand(work.count > 0 && work.lines > 0 && !work.dsts.empty() && !work.srcs.empty(),
         "kernel work without elements or without pointers");
  demand(work.dsts.size() == work.dst_pitches.size() && work.srcs.size() == work.src_pitches.size(),
         "kernel work without a pitch for each pointer");
  std::vector<MemoryAccess> all;
  auto side = [&](const std::vector<std::byte*>& at, const std::vector<std::ptrdiff_t>& pitches,
                  bool writes) {
    for (std::size_t i = 0; i < at.size(); ++i)
      for (std::size_t r = 0; r < work.lines; ++r) {
        const std::byte* begin = at[i] + pitches[i] * static_cast<std::ptrdiff_t>(r);
        require_access(device, begin, work.count * item);
        all.push_back({begin, work.count * item, writes, part});
      }
  };
  side(work.srcs, work.src_pitches, false);
  side(work.dsts, work.dst_pitches, true);
  for (const MemoryAccess& a : all)
    for (const MemoryAccess& b : all)
      demand(!b.writes || a.begin == b.begin || a.begin + a.bytes <= b.begin ||
                 b.begin + b.bytes <= a.begin,
             "kernel work whose destination partly overlaps another of its slices");
  return all;
}

std::vector<MemoryAccess> Emulator::accesses(const CopyRect& it) const {
  std::vector<MemoryAccess> all;
  for (std::size_t r = 0; r < it.rows; ++r) {
    const auto row = static_cast<std::ptrdiff_t>(r);
    for (bool writes : {false, true}) {
      const std::byte* at = writes ? it.dst + it.dst_pitch * row : it.src + it.src_pitch * row;
      const Device owner = find(at) != nullptr ? region(at, it.bytes).device : kHost;
      demand(owner == (writes ? it.dst_device : it.src_device),
             "a copy names a device that does not own the address");
      all.push_back({at, it.bytes, writes, 0});
    }
  }
  return all;
}

}  // namespace pycollect::cuda
