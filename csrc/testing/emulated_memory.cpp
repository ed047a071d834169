// Memory of the emulator (emulator.h). Emulated GPU memory is a memfd, which other processes map by
// its descriptor.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "emulator.h"
#include "reference_kernels.h"

namespace pycollect::cuda {
namespace {

using ipc::UniqueFd;

constexpr std::size_t kPage = 4096;

std::byte* mapped(const UniqueFd& file, std::size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  demand(at != MAP_FAILED, "out of address space");
  return static_cast<std::byte*>(at);
}

bool is_one_file(const UniqueFd& a, const UniqueFd& b) {
  struct stat x = {}, y = {};
  return fstat(a.get(), &x) == 0 && fstat(b.get(), &y) == 0 && x.st_ino == y.st_ino &&
         x.st_dev == y.st_dev;
}

UniqueFd copy_of(const UniqueFd& file) { return UniqueFd(fcntl(file.get(), F_DUPFD_CLOEXEC, 0)); }

}  // namespace

Emulator::~Emulator() {
  streams_.stop();
  for (const auto& [base, memory] : shared_) munmap(base, memory.bytes);
}

std::byte* Emulator::allocate(Device, std::size_t bytes) {
  synchronize_all("allocate");
  const Lock lock = locked();
  enter("out of memory");
  UniqueFd file(memfd_create("pycollect_emulator", MFD_CLOEXEC));
  demand(file && ftruncate(file.get(), static_cast<off_t>(bytes)) == 0, "out of memory");
  std::byte* const base = mapped(file, bytes);
  std::memset(base, kPoison, bytes);
  shared_.emplace(base, SharedAllocation{bytes, std::move(file), true});
  ++counters_["allocated"];
  return base;
}

ExportedMemory Emulator::export_memory(std::byte* base) {
  const Lock lock = locked();
  enter("export_memory");
  const auto found = shared_.find(base);
  if (found == shared_.end() || !found->second.own)
    violation("export_memory of memory that this process has not allocated");
  return {copy_of(found->second.file), found->second.bytes};
}

std::byte* Emulator::map(Device, const UniqueFd& descriptor, std::size_t bytes) {
  synchronize_all("map");
  const Lock lock = locked();
  for (const auto& [base, memory] : shared_)
    if (is_one_file(memory.file, descriptor))
      violation(memory.own ? "a process cannot map memory that it has allocated itself"
                           : "memory is mapped twice");
  std::byte* const base = mapped(descriptor, bytes);
  shared_.emplace(base, SharedAllocation{bytes, copy_of(descriptor), false});
  ++counters_["mapped"];
  return base;
}

void Emulator::unmap(std::byte* base) {
  const Lock lock = locked();
  enter("unmap");
  const auto found = shared_.find(base);
  if (found == shared_.end()) violation("unmap of memory that is not mapped");
  const SharedAllocation memory = std::move(found->second);
  shared_.erase(found);
  munmap(base, memory.bytes);
  --counters_[memory.own ? "allocated" : "mapped"];
}

std::byte* Emulator::register_host(std::byte* memory, std::size_t bytes) {
  synchronize_all("register_host");
  const Lock lock = locked();
  if (reinterpret_cast<std::uintptr_t>(memory) % kPage != 0 || bytes % kPage != 0)
    violation("register_host of memory that is not whole pages");
  registered_[memory] = bytes;
  ++counters_["registered"];
  return memory;
}

void Emulator::unregister_host(std::byte* memory) {
  synchronize_all("unregister_host");
  const Lock lock = locked();
  if (registered_.erase(memory) == 0) violation("unregister_host of memory that is not registered");
  --counters_["registered"];
}

bool Emulator::is_shared(const std::byte* address) const {
  for (const auto& [base, memory] : shared_)
    if (address >= base && address < base + memory.bytes) return true;
  return false;
}

bool Emulator::is_registered(const std::byte* word) const {
  for (const auto& [base, bytes] : registered_)
    if (word >= base && word < base + bytes) return true;
  return false;
}

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
