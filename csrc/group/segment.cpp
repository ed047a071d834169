#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>

#include "../plan/error.h"

namespace pycollect::ipc {
namespace {

// Bytes committed by one fallocate: 1 to 2 ms, because the kernel undoes the whole call when a
// signal arrives (a profiler's, every 10 ms).
constexpr std::size_t kCommitBytes = 4 << 20;
constexpr std::size_t kPage = 4096;

std::string mebibytes(std::size_t bytes) { return text((bytes + (1 << 20) - 1) >> 20, " MiB"); }

using Path = std::filesystem::path;

// Returns the value of a file's line "key value", or of its only word if `key` is empty; nullopt if
// there is none, or no number ("max").
std::optional<std::size_t> number(const Path& path, const std::string& key = {}) {
  std::ifstream file(path);
  for (std::string word; !key.empty() && word != key;)
    if (!(file >> word)) return std::nullopt;
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

std::size_t rest(std::size_t limit, std::optional<std::size_t> used) {
  return limit > used.value_or(0) ? limit - used.value_or(0) : 0;
}

// A group's limit counts pages of files, which the kernel drops when the limit is reached, and does
// not count swapped pages. Version 2 limits swap by itself, version 1 memory and swap together.
std::size_t room_in(const Path& group, bool version2, std::size_t swap) {
  const auto limit = number(group / (version2 ? "memory.max" : "memory.limit_in_bytes"));
  if (!limit) return SIZE_MAX;
  const std::string all = version2 ? "" : "total_";  // of the groups below, too
  const std::size_t files = number(group / "memory.stat", all + "inactive_file").value_or(0) +
                            number(group / "memory.stat", all + "active_file").value_or(0);
  if (const auto most = number(group / "memory.swap.max"))
    swap = std::min(swap, rest(*most, number(group / "memory.swap.current")));
  const auto used = number(group / (version2 ? "memory.current" : "memory.usage_in_bytes"));
  const std::size_t room = rest(*limit, used) + files + swap;
  const auto both = number(group / "memory.memsw.limit_in_bytes");
  if (!both) return room;
  return std::min(room, rest(*both, number(group / "memory.memsw.usage_in_bytes")) + files);
}

}  // namespace

AvailableMemory available_in_cgroups(const std::string& list, const std::string& folder,
                                     std::size_t swap) {
  AvailableMemory least{SIZE_MAX, {}};
  std::ifstream file(list);
  // Line format: number:controllers:/group. Version 2 names no controllers.
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = text(",", line.substr(first + 1, second - first - 1), ",");
    const bool version2 = controllers == ",,";
    if (!version2 && controllers.find(",memory,") == line.npos) continue;
    const Path root = version2 ? Path(folder) : Path(folder) / "memory";
    // Ancestors limit a group, too. A container's root group may be listed with its name on the
    // host: such folders do not exist in the container, but the root does.
    for (Path group = Path(line.substr(second + 1)).relative_path();; group = group.parent_path()) {
      const std::size_t room = room_in(root / group, version2, swap);
      if (room < least.bytes) least = {room, text("in the control group /", group.string())};
      if (group.empty()) break;
    }
  }
  return least;
}

std::shared_ptr<Segment> Segment::create(std::size_t bytes) {
  // Newer kernels expect MFD_NOEXEC_SEAL for files that are not executed; older ones reject it.
  constexpr unsigned kNoExecSeal = 8, kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd file(memfd_create("pycollect", kFlags | kNoExecSeal));
  if (!file && errno == EINVAL) file = UniqueFd(memfd_create("pycollect", kFlags));
  if (!file) refuse("memfd_create", errno);
  rlimit most = {};
  // Above this limit ftruncate would not just fail: SIGXFSZ would kill the process.
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < bytes)
    refuse(text("shared memory of ", mebibytes(bytes), " exceeds the limit of file sizes, ",
                mebibytes(most.rlim_cur), "; raise it (ulimit -f)"),
           EFBIG);
  // The file stays sparse: a range takes no memory until it is committed.
  while (ftruncate(file.get(), bytes) != 0)
    if (const int why = errno; why != EINTR)
      refuse(text("cannot create shared memory of ", mebibytes(bytes)), why);
  // If the file shrank, processes that access the mapping would die of SIGBUS.
  fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return std::make_shared<Segment>(std::move(file), bytes);
}

Segment::Segment(UniqueFd file, std::size_t bytes) : file_(std::move(file)), bytes_(bytes) {
  struct stat found = {};
  if (fstat(descriptor(), &found) != 0 || static_cast<std::size_t>(found.st_size) < bytes)
    refuse(text("the shared memory is smaller than ", mebibytes(bytes)), EINVAL);
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor(), 0);
  if (data == MAP_FAILED) {
    const int why = errno;
    refuse(text("no address space for ", mebibytes(bytes),
                " of shared memory; raise its limit (ulimit -v)"),
           why);
  }
  data_ = static_cast<std::byte*>(data);
  // A core dump would contain the whole mapping, and peers would detect the death only after the
  // dump.
  madvise(data, bytes, MADV_DONTDUMP);
}

Segment::~Segment() { munmap(data_, bytes_); }

void Segment::commit(std::size_t offset, std::size_t bytes) {
  // A missing file imposes no limit.
  constexpr char kMachine[] = "/proc/meminfo";
  const auto memory = number(kMachine, "MemAvailable:");
  const std::size_t swap = number(kMachine, "SwapFree:").value_or(0);
  const std::size_t kibibytes = memory.value_or(0) + swap;
  AvailableMemory most = available_in_cgroups("/proc/self/cgroup", "/sys/fs/cgroup", swap << 10);
  if (memory && kibibytes <= most.bytes >> 10) most = {kibibytes << 10, "on this machine"};
  if (bytes > most.bytes)
    throw std::runtime_error(text("no memory for ", mebibytes(bytes), " of shared memory: ",
                                  mebibytes(most.bytes), " are available ", most.where));
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t part = std::min(bytes - done, kCommitBytes);
    if (fallocate(descriptor(), 0, offset + done, part) == 0)
      done += part;
    else if (const int why = errno; why != EINTR)
      refuse(text("no memory for ", mebibytes(bytes), " of shared memory"), why);
  }
  touch(offset, bytes);
}

void Segment::touch(std::size_t offset, std::size_t bytes) const noexcept {
  const std::size_t begin = offset / kPage * kPage, end = std::min(offset + bytes, bytes_);
  if (begin >= end) return;
  int failed = 0;
  do failed = madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE);
  while (failed != 0 && (errno == EINTR || errno == EAGAIN));
  if (failed == 0 || errno != EINVAL) return;
  // Kernels before 5.14 lack MADV_POPULATE_WRITE. A read also maps a shared file's page for
  // writing.
  for (std::size_t at = begin; at < end; at += kPage)
    std::atomic_ref(reinterpret_cast<unsigned char&>(data_[at])).load(std::memory_order_relaxed);
}

}  // namespace pycollect::ipc
